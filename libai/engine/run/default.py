"""The standard run: a checked config becomes components, hooks and a trainer; train, evaluate, resume.

`default_setup` prepares the process (folders, logs, seeds); `DefaultTrainer` builds the parts, each in an overridable
method, and drives the eager or graph trainer that the config asks for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from libai.config import RunConfig, combinations, solve_batch_sizes, validate
from libai.engine import hooks
from libai.engine.graph.build_errors import GraphBuildError
from libai.engine.hooks.evaluation.eval_metric import look_for
from libai.engine.log.console import ConsoleWriter
from libai.engine.log.json_lines import JSONLinesWriter
from libai.engine.log.tensorboard import TensorBoardWriter
from libai.engine.log.writers import AsyncWriter, LogRecord, Writer
from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.trainer_base import Interrupted
from libai.engine.run.dry_run import dry_run
from libai.engine.run.parity_start import check_at_start
from libai.engine.run.report import start_banner, starting_files, write_summary
from libai.engine.run.run_folder import ReleaseFolderHook, RunFolder, RunFolderHook, prepare_output_dir
from libai.engine.setup import build
from libai.engine.setup.auto_mesh import settle_mesh
from libai.engine.setup.batch_plan import BatchPlan
from libai.engine.setup.choose_mode import mode_of_hooks, time_modes
from libai.engine.setup.support import check_supported
from libai.engine.trainer.batch_scope import BatchScopeError
from libai.engine.trainer.checkpointer import TrainerCheckpointer, require_checkpoint, saved_seed
from libai.engine.trainer.graph import GraphTrainer
from libai.engine.trainer.model_trainer import ModelTrainer
from libai.engine.trainer.switching import TRAINERS, switch_trainer
from libai.forward.contract import as_batch_dict
from libai.launch.startup import StartupTimes
from libai.launch.stop import STOP, StoppedFromOutside, StopRequest, describe_stop, exit_code_of
from libai.parallel import Mesh, ParallelPlan, time_blocks
from libai.utils.distributed import barrier, default_device, get_rank, get_world_size, is_main_process
from libai.utils.errors import OutputLostError, UserError
from libai.utils.logging import setup_logging
from libai.utils.rank_notes import note_output_folder, phase
from libai.utils.seeding import raise_open_file_limit, resolve_seed, seed_everything

logger = logging.getLogger("libai.engine")
_UNSETTLED = "graph.enabled=auto"


def default_setup(cfg: Any, overrides: Sequence[str] | None = None, *, trains: bool = True) -> RunConfig:
    """Check the config and prepare the process: output folder, logs, limits. Every rank must call it.

    `overrides`: what was typed on the command line, for `overrides.txt`. `trains=False` (`--dry-run`, `--eval-only`)
    leaves the output folder alone; else it is made, and refused when another job trains there. What it holds stays
    until training begins. Returns the frozen `RunConfig`. Raises `UserError` before anything is written.
    """
    run = settle_mesh(cfg if isinstance(cfg, RunConfig) else validate(cfg, world_size=get_world_size()))
    run = replace(run, overrides=tuple(overrides or ()))
    output_dir = Path(run.train.output_dir)
    if trains and is_main_process():
        prepare_output_dir(output_dir)
    barrier()
    if trains:
        note_output_folder(output_dir)
    raise_open_file_limit()  # loaders, sockets of many ranks and shards together pass the usual 1024
    setup_logging(output_dir if trains else None, get_rank(), get_world_size(), holds_files=True)
    return run


class DefaultTrainer:
    """One run from a config: builds everything, then `train()`, `evaluate()`, `resume()`.

    Args:
        cfg: a `RunConfig`, or a lazy config that is validated here.
        resume: continue the run in `train.output_dir` from its newest verified checkpoint; an error when there is none.
            Default: `train.resume`.
        import_seconds: what the process took until here, for the report of the start-up; None: not measured.

    Attributes: `run`, `folder`, `mesh`, `plan`, `model`, `optimizer`, `lr_scheduler`, `train_loader`, `test_loaders`,
    `evaluators`, `checkpointer` and `trainer`, the `EagerTrainer` or `GraphTrainer` that runs the loop.

    To change one part, subclass and override its `build_*` classmethod.
    """

    @phase("build")
    def __init__(self, cfg: Any, *, resume: bool | None = None, import_seconds: float | None = None):
        began = time.perf_counter()
        run: Any = cfg if isinstance(cfg, RunConfig) else validate(cfg, world_size=get_world_size())
        self.run = run = settle_mesh(run)
        device = default_device(run.train.device)
        self.mode_reason = _UNSETTLED if run.mode == "auto" else f"graph.enabled={str(run.mode == 'graph').lower()}"
        mode = self._first_mode(device)
        dist = run.train.dist
        self.mesh = Mesh.of_this_job(
            device, dist.data_parallel_size, dist.tensor_parallel_size, dist.pipeline_parallel_size
        )
        self.output_dir = Path(run.train.output_dir)
        self.folder = RunFolder(self.output_dir, run.train.resume if resume is None else resume)
        resumed = self.folder.checkpoint
        self.seed = self._choose_seed(resumed)
        seed_everything(self.seed)

        sizes = solve_batch_sizes(
            run.train.train_micro_batch_size,
            run.train.global_batch_size,
            run.train.num_accumulation_steps,
            self.mesh.data,
        )
        start = time.perf_counter()
        self.train_loader = self.build_train_loader(run, self.mesh, sizes.micro, self.seed)
        self.test_loaders = self.build_test_loaders(run, self.mesh, sizes.micro)
        self.evaluators = self.build_evaluators(run)
        logger.debug("built the data loaders in %.2f s", time.perf_counter() - start)
        self.plan = BatchPlan.make(
            sizes,
            self.mesh.data,
            train_iter=run.train.train_iter,
            train_epoch=run.train.train_epoch,
            warmup_ratio=run.train.warmup_ratio,
            samples_per_epoch=getattr(self.train_loader, "samples_per_epoch", None),
        )
        flow.manual_seed(self.seed)  # initial weights depend on nothing that the loaders drew
        self.model = self.build_model(run)
        build.apply_sync_batch_norm(run, self.model)
        self.optimizer = self.build_optimizer(run, self.model)
        build.scale_lr(run, self.optimizer, self.plan)
        self.lr_scheduler = self.build_lr_scheduler(run, self.optimizer, self.plan)
        block_costs = self._block_costs(sizes.micro)
        self.trainer: ModelTrainer = build.build_trainer(
            run,
            mode,
            self.model,
            self.train_loader,
            self.optimizer,
            self.lr_scheduler,
            self.plan,
            self.mesh,
            self.seed,
            block_costs,
        )
        self.trainer.loop.is_mode_settled = run.mode != "auto"
        #: as cut by measured time, also in a trainer that is only timed
        self._measured_block_costs = block_costs
        self.checkpointer = TrainerCheckpointer(
            self.trainer,
            self.folder.root,
            max_to_keep=run.train.checkpointer.max_to_keep,
            keep_every=run.train.checkpointer.keep_every,
            async_save=run.train.checkpointer.async_save,
            among=self.folder.owns,
            before_save=self.folder.check,
            facts={
                "run_id": self.folder.run_id,
                "seed": self.seed,
                "mesh": self.mesh.describe(),
                "batch": self.plan.describe(),
                "global_batch_size": self.plan.global_batch_size,
            },
        )
        self.stop = StopRequest(run.train.max_seconds)
        self.trainer.loop.agreement.ask(STOP, self.stop)
        self.evaluation_tags: list[str] = []
        self.trainer.register_hooks(self.build_hooks())
        self.start_iter, self._is_training = 0, False
        if resumed is not None:
            self.resume(resumed)
        elif run.train.load_weight.path:
            wanted = run.train.load_weight
            self.load_weights(wanted.path, wanted.strict, wanted.key_mapping, wanted.revise_keys)
        self._warn_of_unused()
        self._import_seconds, self._build_seconds = import_seconds, time.perf_counter() - began
        self._compile_seconds: float | None = None

    @property
    def startup(self) -> StartupTimes:
        """How long this process took to import, to build and, once it has, to compile."""
        return StartupTimes(self._import_seconds, self._build_seconds, self._compile_seconds)

    def _warn_of_unused(self) -> None:
        facts = combinations.Facts(self.run, get_world_size(), self.plan.train_iter, self.start_iter)
        for line in combinations.warnings(facts) if is_main_process() else ():
            logger.warning("%s", line)

    def _block_costs(self, micro_batch_size: int) -> list[float] | None:
        """The measured seconds of the model's blocks where `train.dist.stage_balance=time` asks for them."""
        dist = self.run.train.dist
        if self.mesh.pipeline == 1 or dist.stage_balance != "time" or dist.blocks_per_stage is not None:
            return None
        batch = next(iter(self.build_train_loader(self.run, self.mesh, micro_batch_size, self.seed)))
        names = ParallelPlan.of(self.model, dist.plan).block_names(self.model)
        tensors = {n: flow.tensor(np.asarray(value)) for n, value in as_batch_dict(batch, self.model).items()}
        return time_blocks(self.model, names, tensors)

    def _choose_seed(self, resumed: Path | None) -> int:
        """The config's seed; when it leaves that open, the one of the run that is resumed, or a new one."""
        if self.run.train.seed is None and resumed is not None:
            return resolve_seed(saved_seed(resumed))
        return resolve_seed(self.run.train.seed)

    # ------------------------------------------------------------------ parts, each overridable

    build_model = staticmethod(build.build_model)
    build_optimizer = staticmethod(build.build_optimizer)
    build_lr_scheduler = staticmethod(build.build_lr_scheduler)
    build_train_loader = staticmethod(build.build_train_loader)
    build_test_loaders = staticmethod(build.build_test_loaders)
    build_evaluators = staticmethod(build.build_evaluators)

    def build_writers(self) -> list[Writer]:
        """Where metrics go: console, `metrics.jsonl`, TensorBoard."""
        writers: list[Writer] = [ConsoleWriter(), JSONLinesWriter(self.output_dir / "metrics.jsonl")]
        if self.run.train.tensorboard.enabled:
            writers.append(TensorBoardWriter(self.output_dir / "tb"))
        return [AsyncWriter(w) for w in writers] if self.run.train.async_write_metrics else writers

    def build_hooks(self) -> list[HookBase | None]:
        """The default hooks and those of `train.extra_hooks`."""
        train = self.run.train
        evaluation, checkpointer, profiler = train.evaluation, train.checkpointer, train.profiler
        metric = evaluation.eval_metric and f"eval/{evaluation.eval_metric}"
        evaluates = evaluation.enabled and bool(self.test_loaders)
        self.timer = timer = hooks.IterationTimer(
            self.plan.global_batch_size,
            flops_per_iter=self._flops_per_iter(),
        )
        return [
            RunFolderHook(self._begin),
            ReleaseFolderHook(self._release),
            hooks.DeterminismHook() if train.deterministic else None,
            hooks.RandomStateHook(self.seed),
            timer,
            hooks.EvalHook(evaluation.eval_period, self.evaluate, evaluation.eval_at_start, evaluation.eval_after_train)
            if evaluates
            else None,
            hooks.LRHook(metric if evaluates else None),
            hooks.BestCheckpointHook(self.checkpointer, metric, evaluation.eval_mode)
            if evaluates and metric and checkpointer.enabled and checkpointer.best
            else None,
            hooks.CheckpointHook(
                self.checkpointer,
                checkpointer.period,
                period_seconds=checkpointer.period_seconds,
                save_on_exit=checkpointer.save_on_exit,
            )
            if checkpointer.enabled
            else None,
            hooks.EarlyStopHook(metric, evaluation.early_stop_patience, evaluation.eval_mode)
            if evaluates and metric and evaluation.early_stop_patience
            else None,
            hooks.ProfilerHook(
                self.output_dir / "profile", profiler.start_iter, profiler.num_iters, device=self.mesh.device
            )
            if profiler.enabled
            else None,
            hooks.ShadowUpdateHook(self.run.graph.shadow_every) if self.run.graph.shadow_every else None,
            *build.build_extra_hooks(self.run),
            hooks.WriterHook(self.build_writers(), train.log_period, timer, self.folder.texts),
        ]

    def _begin(self) -> None:
        """Take the output folder for this run; from here on it writes. Collective."""
        self.folder.begin(lambda: starting_files(self.run, self.folder.run_id))

    def _release(self) -> None:
        if not self._is_training:  # `train` has the summary to write yet
            self.folder.release()

    def _flops_per_iter(self) -> float | None:
        per_sample = getattr(self.model, "num_flops_per_sample", None)
        return per_sample and per_sample * self.plan.global_batch_size

    # ------------------------------------------------------------------ what a run does

    @phase("train")
    def train(self, until: int | None = None) -> None:
        """Train from where the run stands to `plan.train_iter`, or to iteration `until`; may be called again.

        Returns at once when nothing is left to do. A signal or `train.max_seconds` stops it between two iterations,
        or two batches of an evaluation; then the state is saved and `StoppedFromOutside` is raised.
        """
        seed_everything(self.seed)  # what was drawn while building does not matter to training
        self._is_training = True
        with self.stop.handling_signals():  # to the end: schedulers repeat their signals
            try:
                self._train(until)
                if self.trainer.status == "interrupted":
                    raise self._stopped()
            finally:
                self._is_training = False
                self.folder.release()

    def _train(self, until: int | None) -> None:
        self.settle_mode()
        self.checkpointer.mode_facts["mode_reason"] = self.mode_reason
        if is_main_process():
            start_banner(self)
        with suppress(Interrupted):  # the loop will see it too, and ends properly
            self.check_metric()
            self.check_evaluation(self.run.train.num_sanity_eval_batches)
        if self.run.train.parity_check:
            check_at_start(self, self.run.train.parity_check)
        if self.run.train.checkpointer.enabled:
            self.checkpointer.check_can_save(with_hooks=False)
        self._begin()
        try:
            start = max(self.start_iter, self.trainer.completed_iters)
            self.trainer.train(start, min(until or self.plan.train_iter, self.plan.train_iter))
            while self.trainer.status == "paused":
                self._switch(self._next_mode, "asked for in mid-run")
                self.trainer.train(self.trainer.iter, self.trainer.max_iter)
        finally:
            if is_main_process() and not isinstance(self.trainer.loop.failure, OutputLostError):
                write_summary(self)

    def _stopped(self) -> StoppedFromOutside:
        asked_by, saved = self.trainer.loop.agreement.take(STOP), self.checkpointer.last_saved
        barrier()  # rank 0 may still have been writing; a rank that leaves earlier makes oneflow abort it
        if is_main_process():
            logger.info(
                "stopped by %s after iteration %d; %s",
                describe_stop(asked_by),
                self.trainer.completed_iters,
                f"--resume goes on from {saved.name}" if saved else "no checkpoint holds it",
            )
        return StoppedFromOutside(exit_code_of(asked_by, is_resumable=saved is not None))

    # ------------------------------------------------------------------ mode

    def _first_mode(self, device: str) -> str:
        """The mode to build in: with `auto` graph mode first, where it supports what the config asks for."""
        if self.run.mode != "auto":
            check_supported(self.run, self.run.mode, device)
            return self.run.mode
        try:
            check_supported(self.run, "graph", device)
        except UserError as reason:
            check_supported(self.run, "eager", device)
            self.mode_reason = f"graph.enabled=auto: {reason}"
            return "eager"
        return "graph"

    def settle_mode(self) -> None:
        """Compile ahead of the loop, fall back to eager mode where the config allows it, and with
        `graph.enabled=auto` keep the mode that all hooks work in, or the faster one. The training state is as before.
        Collective."""
        only = mode_of_hooks(self.trainer.hooks) if self.mode_reason == _UNSETTLED else None
        if only is not None:
            mode, reason = only
            self.mode_reason = f"graph.enabled=auto: {reason}"
            self._switch(mode, self.mode_reason)
        self.trainer.loop.is_mode_settled = True
        if not isinstance(self.trainer, GraphTrainer):
            return
        try:
            self.trainer.prepare()
            if self.trainer.graph is not None:  # kept here: a switch to eager mode drops the trainer
                self._compile_seconds = self.trainer.graph.build_seconds
        except (GraphBuildError, BatchScopeError) as error:
            if self.run.mode != "auto" and self.run.graph.on_build_error != "eager":
                raise
            if is_main_process():
                logger.warning("%s", error)
            could = "be compiled" if isinstance(error, GraphBuildError) else "honour train.dist.batch_scope"
            self._switch("eager", f"the graph could not {could}")
            return
        if self.run.mode == "auto" and self.mode_reason == _UNSETTLED:
            self._keep_the_faster()

    def _keep_the_faster(self) -> None:
        graph = self.trainer
        model = self.build_model(self.run)
        build.apply_sync_batch_norm(self.run, model)
        optimizer = self.build_optimizer(self.run, model)
        schedule = self.build_lr_scheduler(self.run, optimizer, self.plan)
        eager = build.build_trainer(
            self.run,
            "eager",
            model,
            [],
            optimizer,
            schedule,
            self.plan,
            self.mesh,
            self.seed,
            self._measured_block_costs,
        )
        scope = eager.forward_pass.batch_scope
        scope.adopt_findings(graph.forward_pass.batch_scope)
        scope.settle(eager, graph.feed.peek())
        seconds = time_modes({"graph": graph, "eager": eager}, graph.feed.peek())
        seed_everything(self.seed)
        compared = ", ".join(f"{name} {value * 1e3:.1f}" for name, value in seconds.items())
        reason = f"graph.enabled=auto: the faster one ({compared} ms per update)"
        self.mode_reason = reason
        if seconds["eager"] <= seconds["graph"]:
            self._switch("eager", reason)

    def switch_mode(self, mode: str) -> None:
        """Go on in `mode` ("eager" or "graph") with the same state; the curve continues.

        Between two calls of `train` it acts at once; from a hook, after the present iteration. Collective.
        """
        if mode not in TRAINERS:
            raise UserError(f"switch_mode({mode!r}): a run trains in {' or '.join(TRAINERS)} mode.")
        if self.trainer.status == "running":
            if mode != self.trainer.mode:
                self._next_mode = mode
                self.trainer.loop.pause()
            return
        self._switch(mode, "asked for by switch_mode")

    def _switch(self, mode: str, reason: str) -> None:
        if mode == self.trainer.mode:
            return
        before = self.trainer.mode
        check_supported(self.run, mode, self.mesh.device)
        self.trainer = switch_trainer(self.trainer, mode, **build.mode_options(self.run, mode, self.mesh.device))
        self.checkpointer.trainer = self.trainer
        self.mode_reason = self.checkpointer.mode_facts["mode_reason"] = reason
        if is_main_process():
            logger.info(
                "switched from %s to %s mode after iteration %d (%s)",
                before,
                mode,
                self.trainer.completed_iters,
                reason,
            )

    def evaluate(self) -> dict[str, float]:
        """`{"eval/<dataset>/<metric>": value}` over all test loaders. Collective."""
        metrics: dict[str, float] = {}
        for name, loader in self.test_loaders.items():
            metrics.update(
                self.trainer.evaluate(loader, self.evaluators, name, max_batches=self.run.train.evaluation.eval_iter)
            )
        self.evaluation_tags = list(metrics)
        return metrics

    def check_evaluation(self, num_batches: int) -> None:
        """Evaluate the first batches of every test loader and forget the result, so that a mistake in the evaluation
        shows before the first hours of training. `num_batches=0`: nothing. Collective."""
        if num_batches == 0:
            return
        if not self.test_loaders:
            raise UserError(
                f"train.num_sanity_eval_batches={num_batches} has no data: dataloader.test names no dataset. Add one, "
                "or set it to 0."
            )
        for name, loader in self.test_loaders.items():
            self.trainer.evaluate(loader, self.evaluators, name, max_batches=num_batches)
        if is_main_process():
            logger.info("evaluation works: tried on %d batch(es) of %s", num_batches, ", ".join(self.test_loaders))

    def check_metric(self) -> None:
        """Refuse a `train.evaluation.eval_metric` that the evaluation does not give. Collective."""
        evaluation = self.run.train.evaluation
        if evaluation.enabled and evaluation.eval_metric and not self.run.train.extra_hooks:
            # a hook may put a metric of its own; whoever uses the metric looks for it after the first evaluation
            look_for(evaluation.eval_metric, self.trainer, self.test_loaders, self.evaluators)

    def report_evaluation(self) -> dict[str, float]:
        """Evaluate once, log the result and return it (`--eval-only`). Collective."""
        start = time.perf_counter()
        if is_main_process() and not self.start_iter and not self.run.train.load_weight.path:
            logger.warning("these are the initial weights: --resume or train.load_weight=FILE evaluates trained ones")
        metrics = self.evaluate()
        if is_main_process():
            record = LogRecord(self.start_iter, self.plan.train_iter, metrics, "eval", time.perf_counter() - start)
            ConsoleWriter(progress_bar=False).write(record)
        return metrics

    def dry_run(self) -> None:
        """See `libai.engine.run.dry_run` (`--dry-run`). Collective."""
        dry_run(self)

    def predict(self, batch: Mapping[str, Any]) -> Any:
        """See `ModelTrainer.predict`."""
        return self.trainer.predict(batch)

    def resume(self, path: Path | None = None) -> None:
        """Go on from a checkpoint of this run, by default the newest verified one; `UserError` when there is none."""
        self.checkpointer.load(path or require_checkpoint(self.checkpointer.root, self.folder.owns))
        self.start_iter = self.trainer.completed_iters

    def load_weights(
        self,
        path: str,
        strict: bool = True,
        key_mapping: Mapping[str, str] | None = None,
        revise_keys: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Take the model's weights, and nothing else, from elsewhere; arguments as in `checkpoint.load_weights`."""
        from libai import checkpoint

        report = checkpoint.load_weights(path, self.model, key_mapping, strict, revise_keys=revise_keys)
        if is_main_process():
            logger.info("loaded weights from %s: %s", path, report)
