"""The contract of a training step, and the update that a plain loop makes.

All other updates are compared with the plain one. Eager mode extends it (`eager.py`), and graph
mode (`compiled/step.py`) runs it for batches that do not fit the compiled update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import oneflow as flow

from libai.engine.compiled.build_errors import raise_forward_error
from libai.engine.inputs import Batch, Scale, map_shares
from libai.engine.loop import SWITCH_SECONDS
from libai.engine.metrics import StepResult
from libai.engine.options import TrainOptions
from libai.engine.parts import Parts
from libai.forward.contract import read_losses, total_loss, weighted_total
from libai.forward.state import values_kept
from libai.optim import (
    JoinedUpdates,
    LossScaler,
    clip_grad_norm,
    clip_grad_value,
    norm_and_coefficient,
)
from libai.parallel import Mesh, full_tensor
from libai.parallel.data_parallel import GradientReduction
from libai.utils.tensors import detached, saved_values

Forward = Callable[..., Any]
_NO_SCOPE = nullcontext()
_parameters_of = attrgetter("_parameters")


class PlainStep:
    """Makes optimizer updates on its parts: batches → losses → gradients → mean over ranks →
    clipping → optimizer.

    A step reads its arguments and its parts, and holds nothing that a checkpoint holds.

    Args:
        parts: what the step works on.
        reduction: averages the gradients of local replicas, and has the forward to call.
        clear: clears all gradients, as the mode requires before its next update.

    Attributes:
        graph: the compiled update, a `TrainGraph` or the user's own graph; None in eager mode and
            before compilation.
        runs_eagerly: true if updates run operation by operation. In graph mode it becomes true if
            no graph can train the model.
        is_own: false if a user-defined graph makes the updates.
        switch_seconds: time that a thread waits for the interpreter's lock before it requests a
            switch.
        forward: runs the model, which DDP may have wrapped.
        scaler: scales the loss of float16 training; None: no scaling.
        fused: updates all parameters at once; None: each by itself.
        keeps_gradients: leave the gradients of an update to hooks; the next update clears them.
    """

    graph: Any = None
    runs_eagerly = True
    is_own = True
    switch_seconds = SWITCH_SECONDS
    scaler: LossScaler | None = None
    fused: JoinedUpdates | None = None
    keeps_gradients = False

    def __init__(self, parts: Parts, reduction: GradientReduction, clear: Callable[[], None]):
        self.parts = parts
        self.reduction = reduction
        self.forward: Forward = reduction.forward
        self.clear = clear
        self._is_first = True

    def after_backward(self) -> None:
        """Called when the gradients are complete, before they are clipped."""

    # ------------------------------------------------------------------ one update

    def update(
        self,
        batches: Sequence[Any],
        iteration: int,
        forward: Forward | None = None,
        after_backward: Callable[[], None] | None = None,
    ) -> StepResult:
        """Make one update with the micro-batches of this rank; the results stay on the device.

        The schedule is not advanced (`ModelTrainer.finish_update`).
        `libai.engine.compiled.graphs.TrainGraph` compiles the same update; change both together.
        Collective.

        `forward`, `after_backward`: called instead of the methods.
        """
        if self.keeps_gradients:
            self.clear()
        result = self.accumulate(batches, iteration, forward)
        parameters = self.reduce(iteration)
        is_finite = self.scaler is None or self.scaler.unscale(parameters, full_tensor)
        (after_backward or self.after_backward)()
        if is_finite:
            result.grad_norm = self.apply(parameters)
        elif self.parts.options.max_grad_norm is not None:
            result.grad_norm, _ = norm_and_coefficient(parameters, 1.0)
        if not self.keeps_gradients:
            self.clear()
        return result

    def accumulate(
        self, batches: Sequence[Any], iteration: int, forward: Forward | None = None
    ) -> StepResult:
        """Run forward and backward over the micro-batches of one iteration; see `update`."""
        inputs = self.parts.inputs
        named = list(map(inputs.name_inputs, batches))
        tensors = list(map(inputs.to_device, named))
        with inputs.watch(named, f"iteration {iteration + 1}"):
            result = self._run(tensors, iteration, forward or self.forward)
        self.hold(tensors)
        return result

    def hold(self, batches: Sequence[Batch]) -> None:
        """Keep input tensors until the host waits for the device."""

    def _run(self, batches: Sequence[Batch], iteration: int, forward: Forward) -> StepResult:
        """Run forward and backward over the tensors of this rank; see `Inputs.scales`."""
        parts = self.parts
        model, layout, inputs = parts.model, parts.layout, parts.inputs
        scales, shares = inputs.scales(batches)
        losses, metrics = [], []
        for micro, (batch, scale) in enumerate(zip(batches, scales)):
            arguments = layout.lay_out_batch(batch)  # not in `source_ops`: it may compare the ranks
            kept = values_kept(parts.written) if parts.written else _NO_SCOPE
            with kept, inputs.random_scope(iteration, micro), layout.source_ops():
                try:
                    step_losses, step_metrics = read_losses(forward(**arguments), model)
                    self._total(step_losses, scale).backward()  # its hooks may create tensors
                    saved_values.clear()
                except Exception as error:
                    raise_forward_error(error, model, batch, self._is_first)
                    raise
            losses.append(dict(zip(step_losses, map(detached, step_losses.values()))))
            metrics.append(dict(zip(step_metrics, map(detached, step_metrics.values()))))
        self._is_first = False
        return StepResult.of(losses, metrics, shares)

    def _total(self, losses: dict[str, flow.Tensor], scale: Scale) -> flow.Tensor:
        """Return the sum of the losses with their `scale`, which is differentiated."""
        if scale is None:
            total = total_loss(losses)
        elif isinstance(scale, float):
            total = total_loss(losses) * scale
        else:
            total = weighted_total(losses, map_shares(scale, self.parts.layout.replicate))
        return total if self.scaler is None else total * self.scaler.scale

    def reduce(self, iteration: int) -> list[flow.Tensor]:
        """Average the gradients over the data-parallel ranks, unless they already are averages.

        Returns the parameters of the optimizer; a hook may have added some. The result includes
        frozen parameters, which have no gradient but may be trained later.
        Raises `UserError` if the gradient of a parameter would not be averaged over the ranks.
        """
        groups = self.parts.optimizer.param_groups
        parameters = list(chain.from_iterable(map(_parameters_of, groups)))
        # DDP's hooks run even if one process makes the update
        if self.parts.layout.replicas == 1 and not self.reduction.leaves_hooks:
            return parameters
        self.reduction.require(parameters, iteration)
        self.reduction.reduce()
        return parameters

    def apply(self, parameters: Sequence[flow.Tensor]) -> flow.Tensor | None:
        """Clip the gradients and step the optimizer. Return the norm if it is clipped, else None.

        The fused update applies the clipping coefficient itself, unless hooks read the gradients.
        """
        options = self.parts.options
        fused = self.fused if self.fused is not None and self.fused.fits else None
        norm = coefficient = None
        if options.max_grad_value is not None:
            clip_grad_value(parameters, options.max_grad_value)
        if options.max_grad_norm is not None and fused and not self.keeps_gradients:
            norm, coefficient = norm_and_coefficient(parameters, options.max_grad_norm)
        elif options.max_grad_norm is not None:
            norm = clip_grad_norm(parameters, options.max_grad_norm)
        if fused is None:
            self.parts.optimizer.step()
        else:
            fused.step(coefficient)
        return norm

    # ------------------------------------------------------------------ contract of a mode

    def reference(self, parts: Parts) -> PlainStep:
        """Return the step that makes the same updates on `parts` as a plain loop would.

        Gradients left over from other passes are cleared.
        """
        self.clear()
        return PlainStep(parts, self.reduction, self.clear)

    def use_facts(self) -> None:
        """Handle the side effects of forward, `parts.facts`, which are new. Collective."""

    def prepare(self, batches: Sequence[Any], iteration: int) -> None:
        """Make the step ready for updates, for example by compiling. Collective.

        `batches`: micro-batches of one iteration.
        """

    def eager_forward(self) -> AbstractContextManager[None]:
        """Return the context for a forward outside of updates, such as an evaluation."""
        return nullcontext()

    def fetched(self) -> None:
        """Release what was kept until the host waited for the device."""

    def drop(self) -> None:
        """Drop what was compiled; the next update compiles again. Collective."""

    def close(self) -> None:
        """Undo the step's changes to the model, before another step is built. Collective."""
        self.drop()

    @classmethod
    def refuse(
        cls,
        optimizer: flow.optim.Optimizer,
        schedule: Any,
        mesh: Mesh,
        options: TrainOptions,
        **settings: Any,
    ) -> None:
        """Raise `UserError` for parts or settings that this mode does not support."""


def use_amp(step: PlainStep) -> None:
    """Make the updates of `step` in mixed precision if the options ask for it."""
    options = step.parts.options
    if options.amp == "fp16":
        step.scaler = LossScaler(step.parts.optimizer, options.loss_scaling)
    if options.amp is not None:
        step.forward = partial(_autocast, step.forward, options.amp)


def _autocast(forward: Forward, amp: str, **batch: Any) -> Any:
    with flow.autocast("cuda", dtype=flow.float16 if amp == "fp16" else flow.bfloat16):
        return forward(**batch)
