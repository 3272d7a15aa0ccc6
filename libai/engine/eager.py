"""The step of eager mode: what it adds to a plain update.

Averaged replicas, autocast, loss scaling, fused updates, and inputs that are kept until the host
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from libai.engine.data_feed import num_bytes
from libai.engine.inputs import Batch
from libai.engine.options import TrainOptions
from libai.engine.parts import Parts
from libai.engine.step import PlainStep, use_amp
from libai.forward.contract import read_losses
from libai.optim import JoinedUpdates
from libai.parallel import Mesh
from libai.parallel.batch_statistics import batch_norms, share_batch_statistics
from libai.parallel.data_parallel import GradientReduction, build_reduction, renew_parameters

#: maximum bytes of input tensors kept until the next log point
MAX_HELD_BYTES = 16 * 2**20


class EagerStep(PlainStep):
    """The plain update with averaged gradients of local replicas, autocast and fused operations.

    Args:
        parts: see `PlainStep`.
        after_backward: called when the gradients are complete, before they are clipped.
        learn_facts: not used.
        zero_grad_before_forward, zero_grad_set_to_none: see `EagerTrainer`.
    """

    def __init__(
        self,
        parts: Parts,
        after_backward: Callable[[], None],
        learn_facts: Any = None,
        zero_grad_before_forward: bool = False,
        zero_grad_set_to_none: bool | None = None,
    ):
        optimizer = parts.optimizer
        reduction = _reduction_of(parts)
        set_to_none = reduction.clears_to_none(zero_grad_set_to_none)
        super().__init__(parts, reduction, partial(optimizer.zero_grad, set_to_none=set_to_none))
        use_amp(self)
        self.keeps_gradients = zero_grad_before_forward
        self.after_backward = after_backward  # type: ignore[method-assign]
        self.fused = JoinedUpdates(optimizer)
        #: input tensors, kept until the host waits for the device. Otherwise OneFlow's worker
        #: thread would free their arrays, for which it needs the interpreter's lock, and training
        #: would wait (docs/dev/decisions/0007)
        self._held_inputs: list[Batch] = []
        self._max_held: int | None = None
        # gradients left over from the user's own code must not enter the first update
        optimizer.zero_grad(set_to_none=True)

    @classmethod
    def needs_global_tensors(cls, mesh: Mesh, options: TrainOptions) -> bool:
        """Return whether this mode lays the model out as global tensors on `mesh`.

        Ranks that hold full replicas keep them as local tensors.
        """
        shares = options.zero_stage > 0 or options.gradient_reduction == "global"
        return not mesh.is_data_parallel_only or (shares and mesh.data > 1)

    def hold(self, batches: Sequence[Batch]) -> None:
        """See `PlainStep.hold`."""
        if self._max_held is None:
            is_on_cpu = self.parts.inputs.device == "cpu"
            self._max_held = MAX_HELD_BYTES // max(1, num_bytes(batches[0])) if is_on_cpu else 0
        if len(self._held_inputs) >= self._max_held:
            self._held_inputs.clear()
        self._held_inputs += batches

    def fetched(self) -> None:
        """See `PlainStep.fetched`."""
        self._held_inputs.clear()

    def close(self) -> None:
        """See `PlainStep.close`."""
        if self.reduction.leaves_hooks:
            renew_parameters(self.parts.model, self.parts.optimizer)


def _reduction_of(parts: Parts) -> GradientReduction:
    model, layout = parts.model, parts.layout
    if layout.replicas == 1:
        return GradientReduction(model)
    share_batch_statistics(batch_norms(model))
    split = partial(read_losses, model=model)
    groups = parts.optimizer.param_groups
    trained = [one for group in groups for one in group.parameters if one.requires_grad]
    kind = parts.options.gradient_reduction
    return build_reduction(kind, model, trained, split, parts.inputs.device)
