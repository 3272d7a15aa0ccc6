"""Make one update eagerly in any mode: for batches with a shape that was not compiled, and for
comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from libai.engine.metrics import StepResult
from libai.engine.trainer import ModelTrainer
from libai.optim import clip_grad_norm, clip_grad_value


def update_op_by_op(
    trainer: ModelTrainer,
    micro_batches: Sequence[Any],
    forward: Callable[..., Any] | None = None,
    after_backward: Callable[[], None] | None = None,
) -> StepResult:
    """Make the same update as `trainer.update`, but eagerly and without hooks. Collective.

    `forward`: called instead of `trainer.gradients.forward`. `after_backward`: called before
    gradients are averaged over ranks.
    """
    gradients, optimizer, options = trainer.gradients, trainer.optimizer, trainer.options
    named = [gradients.name_inputs(batch) for batch in micro_batches]
    # as in both modes: parameters without an optimizer do not count for the norm
    parameters = [parameter for group in optimizer.param_groups for parameter in group.parameters]
    gradients.clear()
    with gradients.index_check.watch(named):
        batches = [gradients.to_device(batch) for batch in named]
        result = gradients.accumulate_gradients(forward or gradients.forward, batches)
    if after_backward is not None:
        after_backward()
    is_wrapped = (
        gradients.forward is not trainer.model
    )  # DDP's hooks run even if one process makes the update
    if trainer.mesh.data > 1 or is_wrapped:
        trainer.reduce_gradients()
    if options.max_grad_value is not None:
        clip_grad_value(parameters, options.max_grad_value)
    if options.max_grad_norm is not None:
        result.grad_norm = clip_grad_norm(parameters, options.max_grad_norm)
    trainer.optimizer_state.read_counters()
    optimizer.step()
    trainer.optimizer_state.write_counters()
    gradients.clear()
    trainer.finish_update()
    return result
