"""The common part of both trainers: a model with its optimizer and schedule, evaluation, and logged
numbers.

A mode defines `update`, `_begin_mode`, `_needs_global_tensors` and `_build_step`, and may extend
`_end_mode`, `_refuse_parts`, `_use_facts`, `reduce_gradients`, `collect` and `_outputs_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count, islice
from operator import itemgetter
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.data.loaders import EvalLoader
from libai.engine.check_parts import (
    check_arguments,
    check_metrics,
    check_part,
    refuse_uncounted_samples,
)
from libai.engine.compiled.build_errors import raise_forward_error
from libai.engine.data_feed import LoaderOrBuilder
from libai.engine.gradients import Batch, Gradients
from libai.engine.hook_base import HookBase
from libai.engine.loop import TrainerBase
from libai.engine.metrics import StepResult, are_finite, require_same_names, to_numbers
from libai.engine.optimizer_state import OptimizerState
from libai.engine.options import TrainOptions, arguments_of
from libai.forward.contract import as_batch_dict, read_losses, structured
from libai.forward.state import Facts, modes_kept, note_unsaved_buffers
from libai.layers.lora import refuse_unused_adapters
from libai.layers.random import find_unseeded_dropouts
from libai.optim import Optimizers, export_state, import_state
from libai.optim.state import walk_parameters
from libai.parallel import (
    Layout,
    LocalLayout,
    Mesh,
    ParallelPlan,
    localize,
    named_tensors,
    parallelize,
    recompute_in_backward,
)
from libai.parallel.batch_statistics import (
    batch_norms,
    refuse_split_statistics,
    share_batch_statistics,
)
from libai.parallel.layout import memory_shared
from libai.patches.internals import wait_for_device
from libai.scheduler import load_scheduler_state, needs_metric, scheduler_state
from libai.utils.distributed import default_device, gather_objects
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.rank_notes import note_progress, own_state, phase
from libai.utils.seeding import generators_kept
from libai.utils.tensors import detached, digest_of, local_part, map_tensors, saved_values

_lr_of = itemgetter("lr")
#: devices on which OneFlow 0.9 computes in lower precision; compilation tests add the CPU
AMP_DEVICES = ("cuda",)
#: fields of `TrainOptions` that `switch_to` may change
OPTIONS_OF_A_MODE = ("amp", "loss_scaling", "gradient_reduction")
#: mode -> its trainer class; each trainer module registers its class
TRAINERS: dict[str, type[ModelTrainer]] = {}


def trainer_of(mode: str) -> type[ModelTrainer]:
    """Return the trainer class of a mode. Raises `UserError` for an unknown mode."""
    if mode not in TRAINERS:
        raise UserError(f"unknown mode {mode!r}: choose {' or '.join(sorted(TRAINERS))}.")
    return TRAINERS[mode]


class ModelTrainer(TrainerBase):
    """Trains one module with one optimizer; see `EagerTrainer` and `GraphTrainer`.

    Args:
        model: a plain `oneflow.nn.Module` that follows the model contract
            (docs/dev/architecture.md).
        data_loader: micro-batches of this rank, as dicts of arrays or tensors. The keys are
            arguments of `model.forward`.
        optimizer: an optimizer over the parameters of `model`.
        options: training options.
        lr_scheduler: any object with `step()`, which is called once after each update. If its
            `step` needs a metric, `hooks.LRHook` calls it instead.
        settings: individual fields of `options`, and arguments that only the class's mode accepts.
    """

    #: exports and loads the optimizer's state in the form shared by both modes
    optimizer_state: OptimizerState
    #: layout of the model on the mesh: local or global tensors
    layout: Layout
    #: arguments of the trainer that only this mode accepts
    _settings: Mapping[str, Any]
    #: class, options and settings before `switch_to`; None once the new mode is ready
    _switched_from: tuple[type[ModelTrainer], TrainOptions, Mapping[str, Any]] | None = None

    def __init__(
        self,
        model: flow.nn.Module,
        data_loader: LoaderOrBuilder,
        optimizer: flow.optim.Optimizer,
        options: TrainOptions | None = None,
        *,
        lr_scheduler: Any = None,
        **settings: Any,
    ):
        of_mode = {name: settings.pop(name) for name in arguments_of(self.mode) & settings.keys()}
        options = TrainOptions.of(type(self).__name__, options, settings)
        check_arguments(type(self).__name__, model, data_loader, optimizer, lr_scheduler)
        super().__init__(data_loader, num_accumulation_steps=options.num_accumulation_steps)
        self.options = options
        device = default_device(options.device)
        self.loop.device = device
        self.mesh = options.mesh or Mesh.of_this_job(device)
        self.model = model.to(device)
        for module in model.modules():
            if type(module).train is not nn.Module.train:  # it may keep layers in eval mode
                module.train(module.training)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._schedule_needs_metric = needs_metric(lr_scheduler)
        self._batch_norms = batch_norms(model)
        self.register_hooks(self._hooks_of_options())
        if options.zero_stage and self.mesh.data == 1:
            logger.warning(
                "ZeRO (stage %d) saves no memory here: there is only one data-parallel rank",
                options.zero_stage,
            )
        self._model_plan = ParallelPlan.of(model, options.plan)
        self._set_up_model()
        self._refuse_parts(options, **of_mode)
        self._settings = of_mode
        self._begin_mode(**of_mode)

    def _set_up_model(self, layout: Layout | None = None) -> None:
        """Train with the existing `layout` of the model. None: lay it out as this mode requires."""
        self.gradients = Gradients(self, self.loop.device)
        strided = [tensor for _, tensor in named_tensors(self.model) if not tensor.is_contiguous()]
        if strided:
            with memory_shared(self.model):
                for tensor in strided:  # a compiled step would ignore the strides
                    tensor.data = tensor.data.contiguous()
        self.layout = layout or self._lay_out()
        refuse_split_statistics(self.model)
        # raises if the optimizer belongs to another model
        list(walk_parameters(self.optimizer, self.model.named_parameters()))
        names = find_unseeded_dropouts(self.model)
        if names:
            logger.warning(
                "%s: OneFlow 0.9's own dropout ignores the seed and uses the same mask in every "
                "layer and rank. Use libai.layers.Dropout instead: seeded, resumable, equal in "
                "both modes.",
                ", ".join(names),
            )

    @property
    def graph(self) -> nn.Graph | None:
        """The compiled update, a `TrainGraph` or the user's own graph; None in eager mode and
        before compilation.
        """
        return self.optimizer_state.graph

    def _lay_out(self) -> Layout:
        options = self.options
        if self._needs_global_tensors(self.mesh, options):
            layout = parallelize(
                self.model,
                self._model_plan,
                self.mesh,
                zero_stage=options.zero_stage,
                recomputed_blocks=self._recomputed_blocks(),
            )
            parameters = dict(self.model.named_parameters())
            # Adagrad has state before its first update; it must get the layout of the parameters
            import_state(self.optimizer, parameters, *export_state(self.optimizer, parameters))
            return layout
        recompute_in_backward(self.model, self._recomputed_blocks())
        return LocalLayout(self.mesh)

    def _recomputed_blocks(self) -> list[str]:
        """Return the names of the modules to checkpoint.

        Raises `UserError` if the plan names no blocks.
        """
        if not self.options.activation_checkpoint:
            return []
        return self._model_plan.block_names(self.model)

    # ------------------------------------------------- defined or extended by a mode, with `update`

    def _begin_mode(self, *args: Any, **settings: Any) -> None:
        """Set all attributes that only this mode has.

        `settings`: arguments that only this mode accepts.
        """
        raise NotImplementedError

    def _end_mode(self) -> None:
        """Move the optimizer state back to the optimizer, and undo this mode's changes to the
        model.
        """

    def _refuse_parts(self, options: TrainOptions, **settings: Any) -> None:
        """Raise `UserError` for an optimizer, a schedule or settings that this mode does not
        support.
        """
        if options.amp is not None and self.loop.device not in AMP_DEVICES:
            raise UserError(
                f"amp={options.amp!r} does nothing on {self.loop.device}: OneFlow 0.9 computes in "
                "lower precision only on CUDA. Remove amp, or train with device='cuda'."
            )

    @classmethod
    def _needs_global_tensors(cls, mesh: Mesh, options: TrainOptions) -> bool:
        """Return whether this mode lays the model out as global tensors on `mesh`."""
        raise NotImplementedError

    def _build_step(self, micro_batches: list[Any]) -> None:
        """Make the trainer ready for updates, for example by compiling."""
        raise NotImplementedError

    def _hooks_of_options(self) -> list[HookBase]:
        """Return the hooks that `options` ask for."""
        return []

    def reduce_gradients(self) -> None:
        """Average the gradients over the data-parallel ranks, unless they already are averages.

        Collective.
        """

    # ---------------------------------------------------------------- setup before the first update

    def _use_facts(self, facts: Facts) -> None:
        """Store the side effects of forward and handle them. Collective."""
        self.gradients.facts = facts
        note = note_unsaved_buffers(self.model, facts.buffers)
        if note is not None:
            logger.warning("%s", note)
        reached = facts.reached
        if reached is None:
            return
        refuse_unused_adapters(self.model, reached)
        if not self.options.detect_anomalous_params:
            return
        names = [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad and name not in reached
        ]
        if names:
            logger.warning(
                "%d trainable parameter(s) get no gradient from the losses of the first "
                "micro-batch: %s. Use them in the loss, freeze them (requires_grad_(False)) or "
                "remove them.",
                len(names),
                ", ".join(names),
            )

    def _count_tokens(self, micro_batches: list[Any]) -> int | None:
        """Return the number of tokens in one iteration over all ranks, for the throughput.

        This is the number of elements of the model's first input, if the model counts loss items
        and that input is a 2-D integer tensor. Otherwise the result is None, and the throughput
        counts only samples.
        """
        first = next(iter(as_batch_dict(micro_batches[0], self.model).values()))
        if not self.gradients.counts_items or first.ndim != 2 or "int" not in str(first.dtype):
            return None
        return int(np.prod(first.shape)) * len(micro_batches) * self.mesh.data

    # ------------------------------------------------------------------ state and checks

    def state_dict(self) -> dict[str, Any]:
        """See `TrainerBase.state_dict`.

        Adds the state of optimizer, loss scale and schedule. Collective.

        `"optimizer"`: `{"tensors": {"<parameter>/<key>": tensor}, "scalars": {...}}`, the same in
        both modes. Tensors held by the optimizer are not copied. The weights are not included; use
        `model.state_dict()`.
        """
        tensors, scalars = self.optimizer_state.export()
        return {
            **super().state_dict(),
            "optimizer": {"tensors": tensors, "scalars": scalars},
            "lr_scheduler": scheduler_state(self.lr_scheduler, self.optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()` of either mode.

        Parts that it does not contain stay unchanged. Collective.
        """
        super().load_state_dict(state)
        if "optimizer" in state:
            self.optimizer_state.load(**state["optimizer"])
            # the next launch of another trainer's graph would not wait for copies of its tensors
            wait_for_device()
        schedule = state.get("lr_scheduler")
        if self.lr_scheduler is not None and schedule is not None:
            load_scheduler_state(self.lr_scheduler, schedule, self.optimizer)
        self.loop.generation += 1

    def check_finite(self) -> None:
        """See `TrainerBase.check_finite`.

        Also checks the weights on all ranks and combines their batch statistics.

        A gradient that is not finite corrupts the weights immediately, but becomes visible only in
        the next loss. All code that reads the weights calls this first
        (`libai.parallel.batch_statistics`).
        """
        super().check_finite()
        share_batch_statistics(self._batch_norms)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.completed_iters and not are_finite(trained):
            metrics = self.loop.metrics
            bad = {"weights": float("nan")}
            metrics.latest = metrics.policy.on_bad_loss(
                self.completed_iters - 1, bad, dict(metrics.latest)
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Raise `UserError` on every rank if ranks with the whole model differ in weights or
        settings.

        Collective.
        """
        if self.mesh.size == 1 or not self.mesh.is_data_parallel_only:
            return
        mine: dict[str, Any] = {
            name: digest_of(local_part(parameter))
            for name, parameter in self.model.named_parameters()
            if not parameter.is_global or all(kind == flow.sbp.broadcast for kind in parameter.sbp)
        }
        mine["the optimizer's configuration"] = repr(
            [group._options for group in self.optimizer.param_groups]
        )
        by_rank = gather_objects(mine)
        differing = [
            name for name in mine if any(theirs.get(name) != mine[name] for theirs in by_rank)
        ]
        if differing:
            raise UserError(
                f"after iteration {self.completed_iters} {differing[0]} differs between the ranks "
                f"({len(differing)} of {len(mine)} compared values do), so each rank would train "
                "a different model. A custom update must call self.reduce_gradients() before the "
                "optimizer's step, and a hook must make the same changes on all ranks."
            )

    # ------------------------------------------------------------------ learning rate

    def _current_lrs(self) -> dict[str, float]:
        """Return the highest learning rate as `train/lr`, and of each of several optimizers as
        `train/lr/<name>`.
        """
        groups = self.optimizer.param_groups
        rates = {"train/lr": float(max(map(_lr_of, groups)))}
        if isinstance(self.optimizer, Optimizers):
            for group in groups:
                name = f"train/lr/{group['optimizer']}"
                rates[name] = max(float(group["lr"]), rates.get(name, 0.0))
        return rates

    def finish_update(self) -> None:
        """Store the learning rates of the update in `self.loop.rates`, then advance the schedule.

        A custom `update` must call this at its end.
        """
        if (
            self.optimizer is not self.optimizer_state.optimizer
            or self.model is not self.gradients.model
        ):
            raise UserError(
                f"iteration {self.iter + 1}: trainer.optimizer or trainer.model has been replaced "
                "by another object, but updates use the old one. Change the values of the old one "
                "instead (param_groups, load_state_dict), or build a new trainer."
            )
        self.loop.rates = self._current_lrs()
        if self.lr_scheduler is not None and not self._schedule_needs_metric:
            self.lr_scheduler.step()

    # ------------------------------------------------------------------ numbers

    def _as_result(self, returned: Any) -> StepResult:
        """Convert the return value of a custom `update`, which may return losses in any form that
        `forward` may.
        """
        if isinstance(returned, StepResult):
            return returned
        saved_values.clear()
        losses, metrics = map_tensors(read_losses(returned, self), detached)
        if not self.loop.rates:
            raise UserError(
                f"{type(self).__name__}.update has not called self.finish_update(), so the "
                "learning-rate schedule does not advance. Call it at the end of update."
            )
        ranks = 1 if self.layout.is_global else self.mesh.data
        return StepResult.of([losses], [metrics], [1.0 / ranks])

    def to_device(self, batch: Any) -> Batch:
        """Convert a micro-batch to keyword arguments for `self.model`: tensors on this rank's
        device.

        Intended for a custom `update`. Collective with global tensors.
        """
        return self.layout.lay_out_batch(
            self.gradients.to_device(self.gradients.name_inputs(batch))
        )

    def collect(self, results: list[StepResult]) -> list[dict[str, float]]:
        """See `TrainerBase.collect`.

        The last dict has all losses and metrics, learning rates and the gradient norm.

        The other dicts have only `train/loss`, for the finite check.
        """
        results = list(map(self._as_result, results))
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
        """Put the model into eval mode for the block, inside the `evaluating` contexts of all
        hooks.
        """
        with self.loop.not_training(), ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.evaluating())
            stack.enter_context(modes_kept(self.model))
            self.model.eval()
            try:
                yield
            finally:
                self.gradients.evaluated = None

    @phase("evaluate")
    def evaluate(
        self,
        loader: Iterable[Any],
        evaluators: Mapping[str, Any],
        dataset: str = "val",
        max_batches: int | None = None,
    ) -> dict[str, float]:
        """Run `loader` through the model in eval mode and return `{"eval/<dataset>/<metric>":
        value}`.

        `loader` yields `(batch, replicated)` as `build_eval_loader` does, or plain batches of this
        rank. The number of plain batches must be the same on all ranks, and with global tensors
        also their sizes. Results are exact for any layout, because evaluators return sums that are
        added over batches and ranks in float64. An evaluator called `<dataset>/<name>` is used only
        for that dataset.

        Afterwards each module returns to its previous train or eval mode, and the global generators
        of Python and NumPy to their previous states. Raises `Interrupted`
        between two batches if the ranks have agreed to stop. Collective.
        """
        from libai.evaluation import add_sums, evaluators_of, reduce_sums

        evaluators = evaluators_of(evaluators, dataset)
        refuse_uncounted_samples(self.mesh, loader, dataset)
        self._require_all_ranks(
            "evaluations",
            own_state().evaluations + 1,
            f"evaluates the dataset {dataset!r} after iteration {self.completed_iters}",
            "Call trainer.evaluate on every rank, not only on the main one.",
        )
        sums: dict[str, dict[str, Any]] = {name: {} for name in evaluators}
        poll = self.loop.agreement.poller()
        if isinstance(loader, EvalLoader):
            max_batches = loader.num_items(max_batches)
        with self._evaluating(), generators_kept():
            for number, item in enumerate(self._items_of(loader, dataset, max_batches), start=1):
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
        owners: dict[str, str] = {}
        for name, evaluator in evaluators.items():
            total = sums[name] if self.mesh.is_single else reduce_sums(sums[name])
            if not total:
                raise UserError(
                    f"the loader of the evaluation dataset {dataset!r} ({type(loader).__name__}) "
                    "returned no batch on any rank, so there is nothing to measure. Pass a loader "
                    "with data that can be read again."
                )
            for key, value in check_metrics(evaluator.compute(total), evaluator).items():
                if (owner := owners.setdefault(key, name)) != name:
                    raise UserError(
                        f"the evaluators {owner!r} and {name!r} both return a metric called "
                        f"{key!r}, and eval/{dataset}/{key} can be only one of them. Rename one "
                        "metric: derive a class from its evaluator whose compute() and directions "
                        "use another name."
                    )
                metrics[f"eval/{dataset}/{key}"] = value
        return metrics

    def _items_of(self, loader: Iterable[Any], dataset: str, most: int | None) -> Iterator[Any]:
        """Yield up to `most` items of an evaluation loader.

        Raises `UserError` on all ranks if it ends earlier on some. Collective.
        """
        is_even = self.mesh.is_single or isinstance(loader, EvalLoader)
        items = islice(loader, most)
        for number in count():
            item = next(items, None)
            has_item = [item is not None] if is_even else gather_objects(item is not None)
            if len(set(has_item)) > 1:
                raise UserError(
                    f"the loader of the evaluation dataset {dataset!r} ({type(loader).__name__}) "
                    f"ended after {number} batches on rank {has_item.index(False)}, but not on "
                    f"rank {has_item.index(True)}. Return the same number of batches on every "
                    "rank (build_eval_loader does so)."
                )
            if item is None:
                return
            yield item

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs in eval mode for one batch of this rank.

        Collective with global tensors.
        """
        with self._evaluating():
            return self._outputs_of(batch, everywhere=True)[1]

    def _outputs_of(
        self, batch: Any, replicated: bool = False, everywhere: bool = False
    ) -> tuple[Batch, Any]:
        """Return the batch as tensors on this rank's device, and the model's outputs for it as
        local tensors.

        `replicated`: every rank holds the same batch. Collective with global tensors. Then the
        outputs are empty on pipeline stages that do not compute them, unless `everywhere` is set.
        With local tensors the number of batches may differ between ranks. Raises `IndexOutOfRange`
        if an id or a label is out of range.
        """
        gradients, layout = self.gradients, self.layout
        batch = gradients.name_inputs(batch)
        with gradients.index_check.watch([batch]):
            batch = gradients.to_device(batch)
            lay_out = layout.lay_out_replicated_batch if replicated else layout.lay_out_batch
            inputs = lay_out(batch)
            with flow.no_grad(), layout.source_ops():
                try:
                    outputs = self.model(**inputs)
                except Exception as error:
                    is_first = gradients.evaluated is None or gradients.evaluated[1] == 1
                    raise_forward_error(error, self.model, batch, is_first)
                    raise
        num_samples = len(next(iter(batch.values())))
        return batch, map_tensors(
            outputs, lambda tensor: layout.local_output(tensor, num_samples, replicated, everywhere)
        )

    # ------------------------------------------------------------------ switching between modes

    def switch_to(self, mode: str, **settings: Any) -> None:
        """Continue training in `mode` from the current state, between two iterations. Collective.

        Model, optimizer, schedule, loader and hooks stay the same. In a job of several processes
        the parameters become local or global tensors. After DDP they are also replaced by new
        `Parameter` objects, because OneFlow 0.9's DDP leaves hooks on parameters that cannot be
        removed. Do not keep references to individual parameters.

        `settings`: arguments of the trainer of `mode`. `amp` and `gradient_reduction` are reset to
        their defaults.

        If the model cannot be laid out for `mode`, the trainer stays in its old mode and raises the
        error. If it cannot be compiled for `mode`, the next `prepare` (or `train`) returns to the
        old mode and raises the error.

        Raises `NonFiniteLoss` instead of continuing with corrupted weights. Raises `UserError` for
        an unknown mode, for a hook that cannot work in it, and for a trainer class of your own,
        because the other mode would not call its methods.
        """
        target = trainer_of(mode)
        if mode == self.mode:
            return
        if type(self) is not TRAINERS[self.mode]:
            raise UserError(
                f"{type(self).__name__} cannot switch to {mode} mode, because that mode would not "
                f"call its overridden methods. Use hooks instead, or train a {target.__name__} "
                "from a checkpoint."
            )
        may_differ = arguments_of(mode).union(OPTIONS_OF_A_MODE)
        fixed = settings.keys() - may_differ
        if fixed:
            raise UserError(
                f"switch_to({mode!r}) cannot set {', '.join(sorted(fixed))}, because a switch may "
                f"change only {', '.join(sorted(may_differ))}. Build a new trainer to change "
                "anything else."
            )
        shared = {name: settings.pop(name) for name in OPTIONS_OF_A_MODE if name in settings}
        options = replace(self.options, **{"amp": None, "gradient_reduction": "auto", **shared})
        self.check_finite()
        for hook in self.hooks:
            hook.check_mode(mode)
        target._refuse_parts(self, options, **settings)
        self._switched_from = self._change_to(target, options, settings)
        self._is_prepared = False

    def _change_to(
        self, target: type[ModelTrainer], options: TrainOptions, settings: Mapping[str, Any]
    ) -> Any:
        """Change the class to `target` and the options.

        Optimizer and hook state and the facts of forward are kept.

        Returns the class, options and settings before. After a `UserError` the trainer is as
        before. Other errors may occur on one rank only. They are not undone, because undoing is
        collective.
        """
        before = (type(self), self.options, self._settings)
        layout, facts = self.layout, self.gradients.facts
        state = self.optimizer_state.export()
        tensors = [(hook, hook.tensors()) for hook in self.hooks]
        self._end_mode()
        try:
            self._enter_mode(target, options, settings, layout)
        except UserError:
            self._enter_mode(*before, layout)
            raise
        finally:
            self.gradients.facts = facts
            self.optimizer_state.load(*state)
            for hook, of_hook in tensors:
                hook.load_tensors(of_hook)
            self.loop.generation += 1
        return before

    def _enter_mode(
        self,
        target: type[ModelTrainer],
        options: TrainOptions,
        settings: Mapping[str, Any],
        layout: Layout,
    ) -> None:
        """Begin the mode of `target`.

        `layout`: the previous layout, which is kept if it also fits this mode.
        """
        was_global = any(parameter.is_global for parameter in self.model.parameters())
        is_global = target._needs_global_tensors(self.mesh, options)
        if was_global and not is_global:
            localize(self.model)
        self.__class__ = target
        self.options = options
        self._settings = settings
        self._set_up_model(layout if layout.is_global == is_global == was_global else None)
        self._begin_mode(**settings)
