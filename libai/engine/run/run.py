"""The standard run: build components, hooks and a trainer from a checked config, then train,
evaluate or resume.

`Run` builds the parts, each in an overridable method, and drives the eager or graph trainer that
the config selects. Its step makes the updates (`libai.engine.step`), and
`TrainerBase.train` is the loop around it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libai import checkpoint
from libai.config import RunConfig, combinations, validate
from libai.config.settings.other_names import member_meant
from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.events.console import EVAL_SECONDS, format_eval_lines
from libai.engine.events.writers import LogRecord
from libai.engine.hooks import IterationTimer, WriterHook
from libai.engine.hooks.evaluation import chosen_metric
from libai.engine.loop import Interrupted
from libai.engine.run import build, modes
from libai.engine.run.base import RunBase
from libai.engine.run.default_hooks import default_hooks, default_writers
from libai.engine.run.predictor import Predictor, batch_of
from libai.engine.run.report import TrainResult, result_of, start_banner, write_summary
from libai.engine.run.run_folder import (
    RunFolder,
    facts_of,
    position_of,
    prepare_output_dir,
    require_checkpoint,
)
from libai.engine.run.same_ranks import (
    require_same_checkpoint,
    require_same_data,
    require_same_start,
)
from libai.engine.run.trials import dry_run
from libai.engine.trainers import trainer_of
from libai.launch.stop import (
    STOP,
    TIME_LIMIT,
    StoppedFromOutside,
    StopRequest,
    describe_stop,
    exit_code_of,
)
from libai.layers.lora import ADAPTER
from libai.utils.distributed import (
    barrier,
    broadcast_object,
    default_device,
    get_world_size,
    is_main_process,
    result_of_rank_0,
)
from libai.utils.errors import OutputLostError, UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import setup_logging
from libai.utils.rank_notes import phase
from libai.utils.seeding import raise_open_file_limit, resolve_seed, seed_everything


def default_setup(
    cfg: Any, overrides: Sequence[str] | None = None, *, trains: bool = True, quiet: bool = False
) -> RunConfig:
    """Check the config and prepare the process: output folder, logs, limits.

    Every rank must call it.

    `overrides`: the command-line arguments for `overrides.txt`. `trains=False` (`--dry-run`,
    `--eval-only`) leaves the output folder untouched. Otherwise the folder is created, or refused
    if another job trains there. Its contents stay until training begins. `quiet`: see
    `setup_logging`. Returns the frozen `RunConfig`. Raises `UserError` before anything is written.
    """
    config = cfg if isinstance(cfg, RunConfig) else validate(cfg, world_size=get_world_size())
    # take the value of rank 0: processes started by another launcher may each have their own
    # `${now:...}`
    train = replace(config.train, output_dir=broadcast_object(config.train.output_dir))
    config = replace(config, train=train, overrides=tuple(overrides or ()))
    output_dir = Path(train.output_dir)
    if trains and is_main_process():
        prepare_output_dir(output_dir)
    barrier()
    # loaders, sockets of many ranks and shards together exceed the usual limit of 1024
    raise_open_file_limit()
    setup_logging(output_dir if trains else None, holds_files=True, quiet=quiet)
    return config


class Run(RunBase):
    """One run from a config. Builds all parts; then call `train()`, `evaluate()` or `resume()`.

    Args:
        cfg: a `RunConfig`, or a lazy config, which is validated here.
        resume: continue the run in `train.output_dir` from its newest verified checkpoint, or
            continue from the checkpoint at a given path. It is an error if there is none. Default:
            `train.resume`.
        reset: parts that a resume does not take from the checkpoint: "optimizer", "schedule",
            "data".

    Attributes: `config`, `folder`, `mesh`, `plan`, `model`, `optimizer`, `lr_scheduler`,
    `train_loader`, `test_loaders`, `evaluators`, `checkpointer` and `trainer`, the `EagerTrainer`
    or `GraphTrainer` that runs the loop.

    To change one part, subclass and override its `build_*` method, or `trainers`, the trainer class
    of each mode.
    """

    _next_mode: str | None = None

    @phase("build")
    def __init__(self, cfg: Any, *, resume: bool | str | None = None, reset: Sequence[str] = ()):
        config = cfg if isinstance(cfg, RunConfig) else validate(cfg, world_size=get_world_size())
        train = config.train
        require_same_start(config)
        device = default_device(train.device)
        mode, self.mode_reason = modes.first_mode(config, device)
        self.output_dir = Path(train.output_dir)
        # a machine that was started again by itself follows rank 0
        resume, reset = broadcast_object([train.resume if resume is None else resume, list(reset)])
        self.folder = RunFolder(self.output_dir, resume, reset, train.load_best_at_end)
        resumed = self.folder.checkpoint
        require_same_checkpoint(resumed)
        seed = train.seed
        if seed is None and resumed is not None:
            seed = facts_of(resumed).get("seed")
        seed = seed_everything(resolve_seed(seed))
        self.evaluators = self.build_evaluators(config)
        self.metric, self.better = chosen_metric(
            train.evaluation, self.evaluators
        )  # raises before data is read

        position = (0, 0) if resumed is None or "data" in reset else position_of(resumed)
        super().__init__(config, build.build_mesh(config, device), seed, position)
        self.seed_offset = self.mesh.data_rank if train.diff_rank_seed else 0
        self.test_loaders = self.build_test_loaders(config, self.mesh, self.sizes.micro)
        require_same_data({"train": self.train_loader, **self.test_loaders})
        self.model = self.new_model()
        self.optimizer = self.new_optimizer(self.model)
        self.trainer = self.new_trainer(mode, self.model, self.train_loader, self.optimizer)
        self.lr_scheduler = self.trainer.lr_scheduler
        self.checkpointer = self._new_checkpointer()
        self.stop = StopRequest(train.max_seconds)
        self.trainer.loop.epoch = self.plan.epoch
        self.trainer.loop.is_mode_final = self.mode_reason != modes.UNDECIDED
        self.stop.answer_in(self.trainer.loop.agreement)
        self.timer = IterationTimer(self.plan.global_batch_size)
        self.trainer.register_hooks(self.build_hooks())

        self.start_iter = 0
        load_weight = train.load_weight
        if resumed is not None:
            self.resume(resumed, reset)
        elif load_weight.path:
            path = checkpoint.resolve_weights(load_weight.path)
            report = self.load_weights(path, load_weight.revise_keys, load_weight.strict)
            self.checkpointer.begin_from(path, report)
        for line in combinations.warnings(
            config, get_world_size(), self.plan.train_iter, self.start_iter
        ):
            logger.warning("%s", line)

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}.{member_meant(name)}"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.output_dir}: {self.trainer!r}>"

    # ------------------------------------------------------------------ parts, each overridable

    build_test_loaders = staticmethod(build.build_test_loaders)
    build_evaluators = staticmethod(build.build_evaluators)
    build_writers = default_writers
    build_hooks = default_hooks

    def _new_checkpointer(self) -> TrainerCheckpointer:
        settings = self.config.train.checkpointer
        return TrainerCheckpointer(
            self.trainer,
            self.folder.root,
            max_to_keep=settings.max_to_keep,
            async_save=settings.async_save,
            weights_only=settings.weights_only,
            trained_only=(
                bool(self.config.train.lora.patterns)
                if settings.trained_only is None
                else settings.trained_only
            ),
            among=self.folder.owns,
            before_save=self.folder.check,
            links=self.output_dir,
            facts={
                "run_id": self.folder.run_id,
                "seed": self.seed,
                "mesh": self.mesh.describe(),
                "batch": self.plan.describe(),
                "global_batch_size": self.plan.global_batch_size,
            },
        )

    def finish(self) -> None:
        """See `RunBase.finish`. It runs after the `after_train` of all other hooks."""
        trainer, evaluation = self.trainer, self.config.train.evaluation
        has_stopped = trainer.status == "stopped"  # by a hook, such as early stopping
        is_last = trainer.completed_iters >= self.plan.train_iter
        try:
            if has_stopped or (is_last and trainer.status == "finished"):
                if self.config.train.load_best_at_end:
                    self._load_best()
                if evaluation.enabled and evaluation.at_end:
                    trainer.storage.put_scalars(**self.evaluate(datasets=evaluation.at_end))
                    for hook in trainer.hooks:
                        if isinstance(hook, WriterHook):
                            hook.write_after_training()
        except Interrupted:  # a resume, which makes no update, evaluates again
            trainer.status = "interrupted"
        finally:
            self.end()

    def end(self) -> None:
        """Write the summary and release the output folder, if this run holds it.

        Every rank must call it.
        """
        if not self.folder.is_held:
            return
        failure = self.trainer.loop.failure
        try:
            if is_main_process() and not isinstance(failure, OutputLostError):
                write_summary(self)
        except OSError:
            if failure is None:  # otherwise the first error is reported
                raise
        finally:
            self.folder.release()

    # ------------------------------------------------------------------ training

    @phase("train")
    def train(self, until: int | None = None) -> TrainResult:
        """Train from the current iteration to `plan.train_iter`, or to iteration `until`.

        May be called again.

        Returns the result, immediately if nothing is left to do. A signal or `train.max_seconds`
        stops training between two iterations, or two batches of an evaluation. Then the state is
        saved and `StoppedFromOutside` is raised.
        """
        if self.config.train.load_best_at_end and self.trainer.status == "stopped":
            self.resume(
                self.checkpointer.last_saved
            )  # the model has the best weights, not the last ones
        seed_everything(
            self.seed, self.seed_offset
        )  # training must not depend on numbers drawn while building
        with self.stop.handling_signals():  # until the end: job schedulers repeat their signals
            try:
                self._train(until)
                if self.trainer.status == "interrupted":
                    raise self._stopped()
            except Exception as error:
                returns = (
                    self.config.train.on_exception == "return"
                    and self.trainer.loop.failure is error
                )
                if isinstance(error, UserError) or not returns:
                    raise
                logger.exception("training failed, and train.on_exception=return")
            finally:
                self.end()
        return result_of(self)

    def _train(self, until: int | None) -> None:
        trainer, last = self.trainer, self.plan.train_iter
        agreement = trainer.loop.agreement
        self._require_best()
        with suppress(Interrupted):  # the answer to STOP is read below
            self.resolve_mode()
            if trainer.completed_iters < last:
                start_banner(self)
                self.check_evaluation()
            else:
                logger.info(
                    "nothing left to do: all %d iterations are done. To continue, set a larger "
                    "train.train_iter",
                    last,
                )
            agreement.agree()
        if agreement.answers.get(STOP, 0) not in (
            0,
            TIME_LIMIT,
        ):  # the run has not taken its folder, which is unchanged
            trainer.status = "interrupted"
            return
        if self.config.train.checkpointer.enabled:
            self.checkpointer.check_can_save(with_hooks=False)
        trainer.loop.last_iter = last  # a part of the run ends without an additional evaluation
        trainer.train(trainer.completed_iters, min(until or last, last))
        while trainer.status == "paused":
            modes.switch(self, self._next_mode or trainer.mode, "requested during the run")
            self._next_mode = None
            trainer.train(trainer.iter, trainer.max_iter)

    def _require_best(self) -> None:
        """Raise `UserError` if the end of the run could not load the best checkpoint so far.

        Collective.
        """
        if not self.config.train.load_best_at_end:
            return
        best = result_of(self)
        if best.best_path is not None and not result_of_rank_0(best.best_path.is_dir):
            raise UserError(
                f"train.load_best_at_end=true would load {best.best_path}, with the best "
                f"{self.metric} so far ({best.best:.6g}), at the end, but there is no such "
                "checkpoint: it was moved or deleted, or the resumed run has another folder. Copy "
                "it there, or set train.load_best_at_end=false."
            )

    def _load_best(self) -> None:
        """Load the weights of the best checkpoint (`train.load_best_at_end`). Collective."""
        best = result_of(self).best_path
        if best is not None:
            self.load_weights(str(best))
            self.checkpointer.load_tensors_of_hooks(
                checkpoint.load(best)
            )  # also the weight average of that checkpoint
        else:
            logger.warning(
                "no evaluation returned a finite %s: the model keeps its last weights", self.metric
            )

    def _stopped(self) -> StoppedFromOutside:
        asked_by, saved = (
            self.trainer.loop.agreement.answers.pop(STOP, 0),
            self.checkpointer.resumable,
        )
        barrier()  # rank 0 may still be writing, and oneflow aborts it if another rank exits first
        logger.info(
            "stopped by %s after iteration %d; %s",
            describe_stop(asked_by),
            self.trainer.completed_iters,
            f"--resume continues from {saved.name}" if saved else "no checkpoint holds it",
        )
        return StoppedFromOutside(exit_code_of(asked_by, is_resumable=saved is not None))

    # ------------------------------------------------------------------ mode

    def resolve_mode(self) -> None:
        """Choose the mode; see `libai.engine.run.modes.resolve`. Collective."""
        modes.resolve(self)

    def switch_mode(self, mode: str) -> None:
        """Continue in `mode` ("eager" or "graph") with the same state; the training curve
        continues.

        Between two calls of `train` the switch is immediate; in a hook, it follows the current
        iteration. Collective.
        """
        trainer_of(mode)  # raises an error for an unknown mode
        if self.trainer.status == "running":
            if mode != self.trainer.mode:
                self._next_mode = mode
                self.trainer.loop.pause()
            return
        modes.switch(self, mode, "requested by switch_mode")

    def report_evaluation(self) -> dict[str, float]:
        """Evaluate once, log the result and return it (`--eval-only`). Collective."""
        start = time.perf_counter()
        if not self.start_iter and not self.config.train.load_weight.path:
            logger.warning(
                "these are the initial weights; to evaluate others, use --resume or "
                "train.load_weight=FILE"
            )
        path = self.config.train.load_weight.path
        if path and not self.start_iter and self.config.train.ema.enabled:
            self._load_averages(path)
        metrics = self.evaluate()
        scalars = {**metrics, EVAL_SECONDS: time.perf_counter() - start}
        record = LogRecord(self.start_iter, self.plan.train_iter, scalars)
        for line in format_eval_lines(record):
            logger.info("%s", line, extra={"is_result": True})
        return metrics

    def _load_averages(self, path: str) -> None:
        """Load the averaged weights of a checkpoint of a run, if `path` is one and has them."""
        with suppress(checkpoint.CheckpointError):
            saved = checkpoint.load(checkpoint.resolve(path))
            averages = saved.tensors.get("ema")
            if averages:
                revise_keys = self.config.train.load_weight.revise_keys
                checkpoint.load_weights(averages, self.model, revise_keys, strict=False)
                logger.info("evaluating the averaged weights of %s (train.ema)", saved.path)

    dry_run = dry_run  # `--dry-run`
    load = Predictor.of_run  # `Run.load(folder).predict(batch)`

    def predict(self, batch: Mapping[str, Any] | None = None, *, rows: Any = None) -> Any:
        """Return the model's outputs for a batch or for rows of a table, as `Predictor.predict`."""
        return self.trainer.predict(batch_of(self.config, batch, rows))

    def resume(self, path: Path | None = None, reset: Sequence[str] = ()) -> None:
        """Continue from a checkpoint, by default this run's newest verified one, without the parts
        in `reset`.
        """
        self.checkpointer.load(
            path or require_checkpoint(self.checkpointer.root, self.folder.owns), reset
        )
        self.start_iter = self.trainer.completed_iters

    def load_weights(
        self, source: str | Path | Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> checkpoint.WeightsReport:
        """Load only the model's weights from `source`; arguments as in `checkpoint.load_weights`.

        Adapters that are not in `source` keep their initial weights.
        """
        report = checkpoint.load_weights(
            source, self.model, *args, **{"optional": ADAPTER, **kwargs}
        )
        origin = "the given tensors" if isinstance(source, Mapping) else source
        logger.info("loaded weights from %s: %s", origin, report)
        return report
