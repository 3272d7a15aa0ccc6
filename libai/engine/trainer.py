"""The common part of both trainers: a model with its optimizer and schedule, evaluation, and logged
numbers.

The updates are made by a step (`libai.engine.step`), and a change of mode exchanges the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
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
    check_settings,
    describe_bad_input,
    refuse_eval_mode,
    refuse_replaced,
    refuse_uncounted_samples,
)
from libai.engine.data_feed import LoaderOrBuilder
from libai.engine.hook_base import HookBase
from libai.engine.inputs import Batch
from libai.engine.loop import TrainerBase
from libai.engine.metrics import StepResult, are_finite, require_same_names, to_numbers
from libai.engine.options import TrainOptions, arguments_of
from libai.engine.parts import Parts
from libai.forward.contract import as_batch_dict, read_losses, structured
from libai.forward.state import Facts, modes_kept, note_unsaved_buffers, with_class
from libai.layers.lora import refuse_unused_adapters
from libai.optim import Optimizers
from libai.parallel import (
    Mesh,
    ParallelPlan,
    localize,
)
from libai.parallel.batch_statistics import (
    batch_norms,
    share_batch_statistics,
)
from libai.scheduler import load_scheduler_state, needs_metric, scheduler_state
from libai.utils.distributed import default_device, gather_objects, require_all_ranks
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.rank_notes import note_progress, own_state, phase
from libai.utils.seeding import generators_kept
from libai.utils.tensors import detached, digest_of, local_part, map_tensors, saved_values

_lr_of = itemgetter("lr")
#: devices on which OneFlow 0.9 computes in lower precision; compilation tests add the CPU
AMP_DEVICES = ("cuda",)
#: fields of `TrainOptions` that `switch_to` may change
OPTIONS_OF_A_MODE = ("amp", "loss_scaling", "gradient_reduction")


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

    #: mode → the class of its step, a `PlainStep` with another constructor
    _steps: Mapping[str, Any]
    #: "eager" or "graph"
    mode: str
    #: returns the hooks that the options ask for
    _hooks_of_options: Callable[[], list[HookBase]]
    #: makes an update to find the side effects of forward, undoes it, and uses them. Collective
    _learn_facts: Callable[..., None]
    #: mode, options and settings before `switch_to`; None once the new mode is ready
    _switched_from: tuple[str, TrainOptions, Mapping[str, Any]] | None = None

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
        self._plan = ParallelPlan.of(model, options.plan)
        self._refuse_parts(self.mode, options, of_mode)
        self._enter(self.mode, options, of_mode)

    def _refuse_parts(self, mode: str, options: TrainOptions, settings: Mapping[str, Any]) -> None:
        """Raise `UserError` for parts, options or settings that `mode` does not support."""
        if options.amp is not None and self.loop.device not in AMP_DEVICES:
            raise UserError(
                f"amp={options.amp!r} does nothing on {self.loop.device}: OneFlow 0.9 computes in "
                "lower precision only on CUDA. Remove amp, or train with device='cuda'."
            )
        if mode == "graph" and not type(self).update.__module__.startswith("libai."):
            raise UserError(
                f"{type(self).__name__}.update replaces the compiled step, which then never runs. "
                "Pass a custom graph (train_graph=MyGraph), or write the update for an "
                "EagerTrainer."
            )
        step = self._steps[mode]
        step.refuse(self.optimizer, self.lr_scheduler, self.mesh, options, **settings)

    def _enter(
        self,
        mode: str,
        options: TrainOptions,
        settings: Mapping[str, Any],
        before: Parts | None = None,
    ) -> None:
        """Build parts and step of `mode`.

        `before`: the previous parts. Their layout is kept if it also fits this mode.
        """
        step = self._steps[mode]
        is_global = step.needs_global_tensors(self.mesh, options)
        was_global = any(parameter.is_global for parameter in self.model.parameters())
        layout = None
        if before is not None:
            if was_global and not is_global:
                localize(self.model)
            if before.layout.is_global == is_global == was_global:
                layout = before.layout
        self.parts = Parts.build(
            self.model,
            self.optimizer,
            options,
            self._plan,
            self.mesh,
            self.loop.device,
            self.feed,
            is_global,
            layout,
            Facts() if before is None else before.facts,
        )
        self.mode = mode
        self.options = options
        self.layout = self.parts.layout
        self.optimizer_state = self.parts.state
        self._settings = settings
        self._switch_seconds = step.switch_seconds
        after_backward = partial(self.loop.call_hooks, "after_backward")
        # a weak reference avoids a cycle: the trainer and its graph are freed with the last
        # reference to the trainer
        learn_facts = partial(type(self)._learn_facts, weakref.proxy(self))
        self.step = step(self.parts, after_backward, learn_facts, **settings)

    @property
    def graph(self) -> nn.Graph | None:
        """The compiled update, a `TrainGraph` or the user's own graph; None in eager mode and
        before compilation.
        """
        return self.step.graph

    # ------------------------------------------------------------------ one update

    def update(self, micro_batches: list[Any]) -> Any:
        """See `TrainerBase.update`. The step of the mode makes the update."""
        refuse_eval_mode(self.model)
        check_settings(self.optimizer, f"iteration {self.iter + 1}: the optimizer")
        result = self.step.update(micro_batches, self.iter)
        self.finish_update()
        return result

    def reduce_gradients(self) -> None:
        """Average the gradients over the data-parallel ranks, unless they already are averages.

        A custom `update` must call this after its backward passes and before the optimizer step.
        Collective.
        """
        self.step.reduce(self.iter)

    # ---------------------------------------------------------------- setup before the first update

    def _use_facts(self, facts: Facts) -> None:
        """Store the side effects of forward and handle them (docs/dev/decisions/0009).

        Collective.
        """
        self.parts.learn(facts)
        note = note_unsaved_buffers(self.model, facts.buffers)
        if note is not None:
            logger.warning("%s", note)
        self._check_reached(facts.reached)
        self.step.use_facts()
        if not facts.buffers or self.layout.replicas == 1:
            return
        options = self.options
        if options.batch_scope == "global" and options.gradient_reduction == "auto":
            self._use_global_tensors()
            return
        raise UserError(
            f"forward changes the buffer {with_class(self.model, facts.buffers[0])}, and with "
            f"train.dist.batch_scope={options.batch_scope} and "
            f"train.dist.gradient_reduction={options.gradient_reduction} each of "
            f"{self.mesh.data} data-parallel ranks would keep a different value, computed "
            "from its part of the batch. Set batch_scope=global and gradient_reduction=auto "
            "to compute it from the whole batch, or use one rank."
        )

    def _use_global_tensors(self) -> None:
        """Convert the model from one local replica per data-parallel rank to global tensors.

        Training continues as if `gradient_reduction` had been "global". Collective.
        """
        options = replace(self.options, gradient_reduction="global")
        self._change_to(self.mode, options, self._settings)

    def _check_reached(self, reached: Collection[str] | None) -> None:
        """Handle parameters that get no gradient; `reached` names the others, if it is known."""
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
        if not self.parts.inputs.counts_items or first.ndim != 2 or "int" not in str(first.dtype):
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
        """Return the highest rate as `train/lr`, and per optimizer as `train/lr/<name>`."""
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
        refuse_replaced(self.parts, self.model, self.optimizer, self.iter)
        self.loop.rates = self._current_lrs()
        if self.lr_scheduler is not None and not self._schedule_needs_metric:
            self.lr_scheduler.step()

    # ------------------------------------------------------------------ numbers

    def _as_result(self, returned: Any) -> StepResult:
        """Convert the return value of a custom `update`, which may return losses in any form that
        `forward` may.
        """
        return returned if isinstance(returned, StepResult) else self._own_result(returned)

    def _own_result(self, returned: Any) -> StepResult:
        saved_values.clear()
        options = self.options
        if self.step.is_own and (options.max_grad_norm or options.max_grad_value):
            warn_once(
                logger,
                f"unclipped: {type(self).__name__}",
                f"{type(self).__name__}.update replaces the update that clips gradients, so "
                "train.clip_grad has no effect unless this method clips them itself, between "
                "reduce_gradients() and the optimizer's step.",
            )
        losses, metrics = map_tensors(read_losses(returned, self), detached)
        if not self.loop.rates:
            raise UserError(
                f"{type(self).__name__}.update has not called self.finish_update(), so the "
                "learning-rate schedule does not advance. Call it at the end of update."
            )
        return StepResult.of([losses], [metrics], [1.0 / self.layout.replicas])

    def to_device(self, batch: Any) -> Batch:
        """Convert a micro-batch to keyword arguments for `self.model`: tensors on this rank's
        device.

        Intended for a custom `update`. Collective with global tensors.
        """
        return self.parts.inputs.laid_out(self.parts.inputs.name_inputs(batch))

    def collect(self, results: list[StepResult]) -> list[dict[str, float]]:
        """See `TrainerBase.collect`.

        The last dict has all losses and metrics, learning rates and the gradient norm.

        The other dicts have only `train/loss`, for the finite check.
        """
        self.step.fetched()
        results = list(map(self._as_result, results))
        if self.mesh.size > 1:
            require_same_names(results)
        numbers = to_numbers(results, self.layout.replicas > 1)
        numbers[-1].update(self.loop.rates)
        if self.options.amp == "fp16":
            self.optimizer_state.read_counters()
            if "loss_scale" in self.optimizer._state:
                numbers[-1]["train/loss_scale"] = self.optimizer._state["loss_scale"]
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
            yield

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
        require_all_ranks(
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
                place = f"batch {number} of the evaluation dataset {dataset!r}"
                is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], bool)
                batch, replicated = item if is_pair else (item, False)
                if found := describe_bad_input(batch):
                    text = (
                        f"{place}: {found}. Metrics of these samples are not finite unless the "
                        "model replaces such values, and an evaluation with such a metric cannot "
                        "be the best."
                    )
                    warn_once(logger, f"{dataset}: {found}", text)
                with self.step.eager_forward():
                    batch, outputs = self.parts.outputs_of(
                        batch, place, replicated, is_first=number == 1
                    )
                if not self.layout.sees_outputs or (replicated and self.mesh.data_rank != 0):
                    continue
                outputs = structured(outputs)
                outputs = dict(outputs) if isinstance(outputs, dict) else {"outputs": outputs}
                outputs["num_loss_items"] = self.parts.inputs.item_counts([batch])[0]
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
        with self._evaluating(), self.step.eager_forward():
            return self.parts.outputs_of(batch, "the batch to predict", everywhere=True)[1]

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
        refuse_unknown_mode(mode, self._steps)
        if mode == self.mode:
            return
        if not type(self).__module__.startswith("libai."):
            raise UserError(
                f"{type(self).__name__} cannot switch to {mode} mode, because that mode would not "
                f"call its overridden methods. Use hooks instead, or train a {mode.title()}Trainer "
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
        self._refuse_parts(mode, options, settings)
        self._switched_from = self._change_to(mode, options, settings)
        self._is_prepared = False

    def _change_to(
        self, mode: str, options: TrainOptions, settings: Mapping[str, Any]
    ) -> tuple[str, TrainOptions, Mapping[str, Any]]:
        """Close the step and build the step of `mode`. Optimizer and hook state and the facts of
        forward are kept.

        Returns the mode, options and settings before. After a `UserError` the trainer is as before.
        Other errors may occur on one rank only. They are not undone, because undoing is collective.
        """
        before = (self.mode, self.options, self._settings)
        parts = self.parts
        state = parts.state.export()
        tensors = [(hook, hook.tensors()) for hook in self.hooks]
        self.step.close()
        try:
            self._enter(mode, options, settings, parts)
        except UserError:
            self._enter(*before, parts)
            raise
        finally:
            if self.layout is not parts.layout:
                self.optimizer_state.load(*state)
            for hook, of_hook in tensors:
                hook.load_tensors(of_hook)
            self.loop.generation += 1
        return before


def refuse_unknown_mode(mode: str, modes: Iterable[str]) -> None:
    """Raise `UserError` if `mode` is not one of `modes`."""
    if mode not in modes:
        raise UserError(f"unknown mode {mode!r}: choose {' or '.join(sorted(modes))}.")
