"""The common part of both trainers: a model, its optimizer and schedule, evaluation, and the numbers they give.

The two trainers differ in `update`, `_eval_batch` and `optimizer_state`, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import oneflow as flow

from libai.engine.check_parts import check_arguments, check_metrics, check_part
from libai.engine.compiled.build_errors import raise_forward_error
from libai.engine.gradients import Batch, Gradients
from libai.engine.hooks.bad_losses import BadLossHook
from libai.engine.hooks.ema import EMAHook
from libai.engine.loop import TrainerBase
from libai.engine.metrics import StepResult, require_same_names, to_numbers
from libai.engine.optimizer_state import OptimizerState
from libai.engine.options import ARGUMENTS_OF_A_MODE, TrainOptions
from libai.engine.rehearsal.rehearsal import compare_on_mesh, look_ahead, require_same
from libai.forward.contract import as_batch_dict, read_losses, structured
from libai.forward.index_check import NOTHING
from libai.forward.state import Facts, note_unsaved_buffers
from libai.layers.lora import refuse_unused_adapters
from libai.layers.random import find_unseeded_dropouts
from libai.optim import Optimizers, export_state, import_state
from libai.optim.state import walk_parameters
from libai.parallel import Layout, LocalLayout, Mesh, ParallelPlan, localize, parallelize, recompute_in_backward
from libai.parallel.batch_statistics import batch_norms, refuse_split_statistics, share_batch_statistics
from libai.patches.internals import wait_for_device
from libai.scheduler import load_scheduler_state, needs_metric, scheduler_state
from libai.utils.distributed import default_device, gather_objects, is_main_process
from libai.utils.errors import UserError
from libai.utils.rank_notes import note_progress, phase
from libai.utils.tensors import clear_gradients, detached, digest_of, map_tensors

logger = logging.getLogger("libai.engine")
#: where OneFlow 0.9 computes in lower precision; tests of what is compiled add the CPU
AMP_DEVICES = ("cuda",)
#: fields of `TrainOptions` that `switch_to` may change
OPTIONS_OF_A_MODE = ("amp", "loss_scaling", "gradient_reduction")
#: mode -> the trainer of that mode; the modules of the trainers enter themselves
TRAINERS: dict[str, type[ModelTrainer]] = {}


class ModelTrainer(TrainerBase):
    """Trains one module with one optimizer; see `EagerTrainer` and `GraphTrainer`.

    Args:
        model: a plain `oneflow.nn.Module` that keeps the model contract (docs/dev/architecture.md).
        data_loader: micro-batches of this rank, dicts of arrays or tensors whose keys are `model.forward`'s arguments.
        optimizer: over the parameters of `model`.
        options: how to train.
        lr_scheduler: stepped once after each update; any object with `step()`. One whose `step` wants a metric is
            left to `hooks.LRHook`.
        settings: single fields of `options`.
    """

    #: exports and takes back what the optimizer has, in the form that both modes share
    optimizer_state: OptimizerState
    #: how the model lies on the mesh: as local tensors, or as global ones
    layout: Layout
    #: this rank may run a forward that not every rank runs
    _runs_alone = True
    #: the forward that is being evaluated looks up indices that nobody has looked up before
    _looks_up = False
    #: the compiled update, a `TrainGraph` or a graph of the user's own; None in eager mode and before compilation
    graph: Any = None

    def __init__(
        self,
        model: flow.nn.Module,
        data_loader: Iterable[Any] | Callable[[], Iterable[Any]],
        optimizer: flow.optim.Optimizer,
        options: TrainOptions | None = None,
        *,
        lr_scheduler: Any = None,
        **settings: Any,
    ):
        options = TrainOptions.of(type(self).__name__, options, settings)
        check_arguments(type(self).__name__, model, data_loader, optimizer, lr_scheduler)
        super().__init__(data_loader, num_accumulation_steps=options.num_accumulation_steps)
        self.options = options
        device = default_device(options.device)
        _refuse_amp_without_effect(options.amp, device)
        self.loop.device = device
        self.mesh = options.mesh or Mesh.of_this_job(device)
        self.model = model.to(device)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._schedule_needs_metric = needs_metric(lr_scheduler)
        self.loop.rates = self._current_lrs()
        self._batch_norms = batch_norms(model)
        if options.non_finite != "raise":
            self.register_hooks([BadLossHook(options.non_finite, lr_scheduler)])
        if options.zero_stage and self.mesh.data == 1 and is_main_process():
            logger.warning(
                "ZeRO (stage %d) saves nothing here: one data-parallel rank has nobody to share with",
                options.zero_stage,
            )
        if options.ema_decay is not None:
            self.register_hooks([EMAHook(options.ema_decay)])
        self._model_plan = ParallelPlan.of(model, options.plan)
        self._take_layout()

    def _take_layout(self, layout: Layout | None = None) -> None:
        """Train the model as `layout` says it lies; None: lay it out as this mode needs it."""
        self.gradients = Gradients(self, self.loop.device)
        self.layout = layout or self._lay_out()
        refuse_split_statistics(self.model)
        list(walk_parameters(self.optimizer, self.model.named_parameters()))  # raises for another model's optimizer
        self._warn_of_stock_dropout()

    def _begin_mode(self, *args: Any, **settings: Any) -> None:
        """Set all attributes that only this mode has. `settings`: those of one mode."""
        raise NotImplementedError(f"{type(self).__name__} must define _begin_mode")

    def _end_mode(self) -> None:
        """Bring the optimizer's state back to the optimizer, and take back what this mode has done to the model."""

    def _refuse_parts(self, options: TrainOptions, **settings: Any) -> None:
        """Raise `UserError` for an optimizer, a schedule or settings that this mode cannot honour."""

    def switch_to(self, mode: str, **settings: Any) -> None:
        """Continue in `mode` exactly from here, between two iterations.

        Model, optimizer, schedule, loader and hooks stay. In a job of several processes the parameters become local or
        global tensors; after training with OneFlow 0.9's DDP they are new `Parameter` objects, because it leaves hooks
        on the old ones that cannot be taken off: keep no references to single parameters.

        `settings`: arguments of the trainer of `mode`; `amp` and `gradient_reduction` are not kept. Collective. Raises
        `NonFiniteLoss` rather than carry corrupted weights over, `UserError` for an unknown mode, a hook that cannot
        work in it, or a trainer class of your own, whose methods the other mode would not call.
        """
        if mode not in TRAINERS:
            raise UserError(f"there is no mode {mode!r}: a run trains in {' or '.join(sorted(TRAINERS))} mode.")
        if mode == self.mode:
            return
        target = TRAINERS[mode]
        if type(self) is not TRAINERS[self.mode]:
            raise UserError(
                f"{type(self).__name__} cannot switch to {mode} mode, which would not call its own methods. Use hooks "
                f"instead, or train a {target.__name__} from a checkpoint."
            )
        of_mode = [name for name, owner in ARGUMENTS_OF_A_MODE.items() if owner == target.__name__]
        fixed = settings.keys() - {*of_mode, *OPTIONS_OF_A_MODE}
        if fixed:
            raise UserError(
                f"switch_to({mode!r}) cannot set {', '.join(sorted(fixed))}: another mode may have other values of "
                f"{', '.join(sorted({*of_mode, *OPTIONS_OF_A_MODE}))}. Build a trainer with the rest."
            )
        shared = {name: settings.pop(name) for name in OPTIONS_OF_A_MODE if name in settings}
        options = replace(self.options, **{"amp": None, "gradient_reduction": "auto", **shared})
        _refuse_amp_without_effect(options.amp, self.loop.device)
        self.check_finite()
        for hook in self.hooks:
            hook.check_mode(mode)
        target._refuse_parts(self, options, **settings)
        self._change_to(target, options, **settings)
        self._is_prepared = False

    def _change_to(self, target: type[ModelTrainer], options: TrainOptions, **settings: Any) -> None:
        """Train as `target` does, with `options`. The state of optimizer and hooks stays, and the facts of forward."""
        layout, facts = self.layout, self.gradients.facts
        is_global = target._needs_global_tensors(self.mesh, options.zero_stage, options.gradient_reduction)
        state = self.optimizer_state.export()
        tensors = [(hook, hook.tensors()) for hook in self.hooks if hook.overrides("tensors")]
        self._end_mode()
        if layout.is_global and not is_global:
            localize(self.model)
        self.__class__ = target
        self.options = options
        self._take_layout(layout if layout.is_global == is_global else None)
        self.gradients.facts = facts
        self._begin_mode(**settings)
        self.optimizer_state.load(*state)
        for hook, of_hook in tensors:
            hook.load_tensors(of_hook)
        self.loop.generation += 1

    def _lay_out(self) -> Layout:
        options = self.options
        if self._needs_global_tensors(self.mesh, options.zero_stage, options.gradient_reduction):
            layout = parallelize(
                self.model,
                self._model_plan,
                self.mesh,
                zero_stage=options.zero_stage,
                recomputed_blocks=self._recomputed_blocks(),
            )
            parameters = dict(self.model.named_parameters())
            # Adagrad has state before its first update, which is laid out as the parameters are
            import_state(self.optimizer, parameters, *export_state(self.optimizer, parameters))
            return layout
        recompute_in_backward(self.model, self._recomputed_blocks())
        return LocalLayout(self.mesh)

    def _recomputed_blocks(self) -> list[str]:
        """Names of the modules that activation checkpointing was asked for. Raises `UserError` when no plan has any."""
        if not self.options.activation_checkpoint:
            return []
        return self._model_plan.block_names(self.model)

    @classmethod
    def _needs_global_tensors(cls, mesh: Mesh, zero_stage: int = 0, gradient_reduction: str = "auto") -> bool:
        """Return whether this mode lays the model out as global tensors on `mesh`."""
        raise NotImplementedError(f"{cls.__name__} must define _needs_global_tensors")

    def _warn_of_stock_dropout(self) -> None:
        names = find_unseeded_dropouts(self.model)
        if names and is_main_process():
            logger.warning(
                "%s: OneFlow 0.9's own dropout ignores the seed and draws the same mask in every layer and rank. "
                "libai.layers.Dropout takes its place: seeded, resumable, equal in both modes.",
                ", ".join(names),
            )

    # ------------------------------------------------------------------ what happens once

    @phase("prepare")
    def prepare(self) -> None:
        """See `TrainerBase.prepare`: make the next updates eagerly, lay the model out as they demand, compile in graph
        mode, and refuse a trainer that makes other updates (`libai.engine.rehearsal`). All of it is put back, and the
        batches stay unread. Collective.

        Raises on every rank when any rank cannot train; in graph mode `GraphBuildError` when it cannot compile.
        """
        if self._is_prepared:
            return
        micro_batches = self.feed.peek()
        self.feed.items_per_iter = self._count_tokens(micro_batches)
        self._refuse_equal_batches(micro_batches)
        iterations, reference = look_ahead(self)
        if reference is not None:
            self._learn(reference.facts)
            compare_on_mesh(self, iterations, reference)
        self._build_step(micro_batches)
        if reference is not None:
            require_same(self, iterations, reference)
        super().prepare()

    def _build_step(self, micro_batches: list[Any]) -> None:
        """Bring the trainer into the form in which it makes updates."""
        raise NotImplementedError(f"{type(self).__name__} must define _build_step")

    def _learn(self, facts: Facts) -> None:
        """Act on the side effects of forward. Collective."""
        self.gradients.facts = facts
        note = note_unsaved_buffers(self.model, facts.buffers)
        if note is not None and is_main_process():
            logger.warning("%s", note)
        reached = facts.reached
        if reached is None:
            return
        refuse_unused_adapters(self.model, reached)
        if not self.options.detect_anomalous_params:
            return
        names = [name for name, p in self.model.named_parameters() if p.requires_grad and name not in reached]
        if names and is_main_process():
            logger.warning(
                "%d trainable parameter(s) get no gradient from the losses of the first micro-batch: %s. Use them in "
                "the loss, freeze them (requires_grad_(False)) or remove them.",
                len(names),
                ", ".join(names),
            )

    def _refuse_equal_batches(self, micro_batches: list[Any]) -> None:
        """Raise `UserError` on every rank if two data-parallel ranks begin with the same samples. Collective."""
        if self.mesh.data == 1:
            return
        loader = self.feed.loader
        mine = None if getattr(loader, "is_replicated", False) else digest_of(micro_batches)
        found = gather_objects((self.mesh.data_rank, mine))
        ranks: dict[int, int] = {}
        for rank, digest in found:
            if digest is not None and ranks.setdefault(digest, rank) != rank:
                raise UserError(
                    f"data-parallel ranks {ranks[digest]} and {rank} begin with the same samples, so that each would "
                    "be counted twice. Let the loader give every rank its own part (build_train_loader does; yours "
                    "by mesh.data_rank of mesh.data), or set is_replicated = True on it if that is meant."
                )

    def _count_tokens(self, micro_batches: list[Any]) -> int | None:
        """Tokens of one iteration over all ranks, for the throughput: the elements of the first input of a model that
        counts loss items, where that is a table of integers; None where samples are all there is to count."""
        first = next(iter(as_batch_dict(micro_batches[0], self.model).values()))
        if not self.gradients.counts_items or first.ndim != 2 or "int" not in str(first.dtype):
            return None
        return int(np.prod(first.shape)) * len(micro_batches) * self.mesh.data

    # ------------------------------------------------------------------ what eager and graph give

    def _eval_batch(self, batch: Batch, replicated: bool = False, everywhere: bool = False) -> Any:
        """Run the model in eval mode on one micro-batch of this rank; outputs are local tensors of this rank.

        `replicated`: every rank holds the same batch. Collective in graph mode and with global tensors; then the
        outputs are empty on ranks of other stages than the one that computes them, unless `everywhere` is set. With
        local tensors ranks need not have equally many batches.
        """
        layout = self.layout
        lay_out = layout.lay_out_replicated_batch if replicated else layout.lay_out_batch
        with flow.no_grad(), layout.source_ops():
            try:
                outputs = self.model(**lay_out(batch))
            except Exception as error:
                is_first = self.gradients.evaluated is None or self.gradients.evaluated[1] == 1
                raise_forward_error(error, self.model, batch, is_first)
                raise
        return self._localize_outputs(outputs, batch, replicated, everywhere)

    def _localize_outputs(self, outputs: Any, batch: Batch, replicated: bool, everywhere: bool) -> Any:
        """Return the model's outputs for this rank's `batch` as local tensors."""
        num_samples = len(next(iter(batch.values())))
        local = self.layout.local_output
        return map_tensors(outputs, lambda tensor: local(tensor, num_samples, replicated, everywhere))

    def state_dict(self) -> dict[str, Any]:
        """See `TrainerBase.state_dict`; also the state of optimizer, loss scale and schedule. Collective.

        `"optimizer"`: `{"tensors": {"<parameter>/<key>": tensor}, "scalars": {...}}`, the same in both modes; the
        tensors are the optimizer's own where it has them, not copies. The weights are in `model.state_dict()`.
        """
        tensors, scalars = self.optimizer_state.export()
        return {
            **super().state_dict(),
            "optimizer": {"tensors": tensors, "scalars": scalars},
            "lr_scheduler": scheduler_state(self.lr_scheduler, self.optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back `state_dict()`, of this mode or the other; what it does not hold stays as it is. Collective."""
        super().load_state_dict(state)
        if "optimizer" in state:
            self.optimizer_state.load(**state["optimizer"])
            wait_for_device()  # they may be tensors of another trainer's graph, whose next launch waits for no copy
        schedule = state.get("lr_scheduler")
        if self.lr_scheduler is not None and schedule is not None:
            load_scheduler_state(self.lr_scheduler, schedule, self.optimizer)
        self.loop.generation += 1

    def reduce_gradients(self) -> None:
        """Average the gradients over the data-parallel ranks, if they are not averaged yet. Collective."""

    def clear_gradients(self) -> None:
        """Forget all gradients, as this mode needs it before its next update."""
        clear_gradients(self.model)

    def check_finite(self) -> None:
        """See `TrainerBase.check_finite`. Whoever reads the weights calls this first, so that it also brings the batch
        statistics of all ranks together (`libai.parallel.batch_statistics`)."""
        super().check_finite()
        share_batch_statistics(self._batch_norms)

    # ------------------------------------------------------------------ learning rate

    def _current_lrs(self) -> dict[str, float]:
        """Return `train/lr`, the highest rate of all groups, and the highest of each of several optimizers."""
        groups = self.optimizer.param_groups
        rates = {"train/lr": float(max([group["lr"] for group in groups]))}  # a list: half the time of a generator
        if isinstance(self.optimizer, Optimizers):
            for group in groups:
                name = f"train/lr/{group['optimizer']}"
                rates[name] = max(float(group["lr"]), rates.get(name, 0.0))
        return rates

    def finish_update(self) -> None:
        """Advance the schedule after an update; keeps the rates that the update has used in `self.loop.rates`.

        An `update` of your own calls it at its end.
        """
        self.loop.rates = self._current_lrs()
        if self.lr_scheduler is not None and not self._schedule_needs_metric:
            self.lr_scheduler.step()

    # ------------------------------------------------------------------ numbers

    def _as_result(self, returned: Any) -> StepResult:
        """Return the result of a user's own `update`, which may return losses as `forward` does."""
        losses, metrics = read_losses(returned, self)
        values = [{name: detached(value) for name, value in part.items()} for part in (losses, metrics)]
        ranks = 1 if self.layout.is_global else self.mesh.data
        return StepResult.of(values[:1], values[1:], [1.0 / ranks])

    def to_device(self, batch: Any) -> Batch:
        """Return a micro-batch as keyword arguments for `self.model`, tensors on this rank's device; for an `update` of
        your own. Collective with global tensors."""
        return self.layout.lay_out_batch(self.gradients.to_device(batch))

    def collect(self, results: list[StepResult]) -> list[dict[str, float]]:
        """See `TrainerBase.collect`. The last dict has every loss, metric, the rates and the gradient norm; the earlier
        ones only `train/loss`, which the finite check needs."""
        if self.mesh.size > 1:
            require_same_names(results)
        numbers = to_numbers(results, self.mesh.data > 1 and not self.layout.is_global)
        numbers[-1].update(self.loop.rates)
        if self.options.amp == "fp16":
            scale = self.optimizer_state.loss_scale()
            if scale:
                numbers[-1]["train/loss_scale"] = scale["loss_scale"]
        return numbers

    # ------------------------------------------------------------------ evaluation

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model into eval mode in the block, which runs in whatever hooks want an evaluation to run in."""
        was_training = self.model.training
        with self.loop.not_training(), ExitStack() as stack:
            for hook in self.hooks:
                if hook.overrides("evaluating"):
                    stack.enter_context(hook.evaluating())
            self.model.eval()
            try:
                yield
            finally:
                self.gradients.evaluated = None
                self.model.train(was_training)

    @phase("evaluate")
    def evaluate(
        self, loader: Iterable[Any], evaluators: Mapping[str, Any], dataset: str = "val", max_batches: int | None = None
    ) -> dict[str, float]:
        """Run `loader` through the model in eval mode and return `{"eval/<dataset>/<metric>": value}`.

        `loader` yields `(batch, replicated)` as `build_eval_loader` does, or plain batches of this rank (then every
        rank must give the same number of equally large batches). Exact for any layout: evaluators give additive sums,
        added over batches and ranks in float64; one called `<dataset>/<name>` judges that dataset alone. Collective.
        The model is in training mode again afterwards. Raises `Interrupted` between two batches when the ranks have
        agreed to stop.
        """
        from libai.evaluation import add_sums, evaluators_of, reduce_sums

        evaluators = evaluators_of(evaluators, dataset)
        sums: dict[str, dict[str, Any]] = {name: {} for name in evaluators}
        poll = self.loop.agreement.poller()
        with self._evaluating():
            for number, item in enumerate(islice(loader, max_batches), start=1):
                note_progress()
                poll()
                self._raise_if_stopping()
                self.gradients.evaluated = (dataset, number)
                is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], bool)
                batch, replicated = item if is_pair else (item, False)
                batch, outputs = self._outputs_of(batch, replicated)
                if not self.layout.sees_outputs or (replicated and self.mesh.data_rank != 0):
                    continue
                outputs = structured(outputs)
                outputs = dict(outputs) if isinstance(outputs, dict) else {"outputs": outputs}
                outputs["num_loss_items"] = self.gradients.item_counts([batch])[0]
                for name, evaluator in evaluators.items():
                    found = evaluator.process(batch, outputs)
                    check_part("sums", found, f"the result of {type(evaluator).__name__}.process")
                    sums[name] = add_sums(sums[name], dict(found))
        metrics: dict[str, float] = {}
        for name, evaluator in evaluators.items():
            total = sums[name] if self.mesh.is_single else reduce_sums(sums[name])
            if not total:
                raise UserError(
                    f"the loader of the evaluation dataset {dataset!r} ({type(loader).__name__}) gave no batch on any "
                    "rank, so there is nothing to measure. Give it data, or an iterable that can be started again."
                )
            for key, value in check_metrics(evaluator.compute(total), evaluator).items():
                metrics[f"eval/{dataset}/{key}"] = value
        return metrics

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for one batch of this rank, in eval mode. Collective with global tensors."""
        with self._evaluating():
            return self._outputs_of(batch, everywhere=True)[1]

    def _outputs_of(self, batch: Any, replicated: bool = False, everywhere: bool = False) -> tuple[Batch, Any]:
        """Return the batch as tensors of this rank, and the model's outputs for it; see `_eval_batch`.

        Raises `IndexOutOfRange` for an id or a label that the model has no row for.
        """
        gradients = self.gradients
        batch = gradients.name_inputs(batch)
        watching = gradients.index_check.watch([batch], gradients.describe_batch, self._runs_alone)
        self._looks_up = watching is not NOTHING
        with watching:
            batch = gradients.to_device(batch)
            return batch, self._eval_batch(batch, replicated, everywhere)


def _refuse_amp_without_effect(amp: str | None, device: str) -> None:
    if amp is not None and device not in AMP_DEVICES:
        raise UserError(
            f"amp={amp!r} does nothing on {device}: OneFlow 0.9 computes in lower precision on CUDA only. "
            "Leave it out, or train with device='cuda'."
        )
