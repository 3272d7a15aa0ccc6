"""Which module's output, loss or gradient is not finite first, when one iteration is computed again op by op."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import oneflow as flow

from libai.forward.contract import total_loss
from libai.forward.python_state import forward_hooks
from libai.parallel import full_tensor
from libai.utils.distributed import gather_objects
from libai.utils.tensors import part_here, tensors_in

Batch = dict[str, flow.Tensor]


def weights_are_finite(trainer: Any) -> bool:
    """Whether every parameter and buffer is finite. Waits for the device; collective for global tensors."""
    return all(_is_finite(tensor) for tensor in (*trainer.model.parameters(), *trainer.model.buffers()))


def find_first_non_finite(trainer: Any, micro_batches: list[Any]) -> str:
    """Run one iteration's batches op by op, without an update, and say what is not finite first.

    Looks at the inputs, the weights, each module's output in the order of execution, the losses, and the gradients
    from the loss backwards. Collective. The model is left as it was, but for the buffers that a forward changes.
    """
    found = _first_on_this_rank(trainer, micro_batches)
    by_rank = gather_objects(found) if trainer.mesh.size > 1 else [found]
    seen: dict[int, _Found] = {rank: _Found(*one) for rank, one in enumerate(by_rank) if one is not None}
    if not seen:
        return "every output and gradient of the replay in eager mode is finite"
    # a global tensor is not finite on every rank, but only those whose part it is have given rise to it
    guilty = [rank for rank, one in seen.items() if one.is_here] or list(seen)
    text = seen[guilty[0]].text
    if len(guilty) == len(by_rank):
        return text
    return f"{text} (rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))})"


class _Found(NamedTuple):
    """What is not finite first; `is_here`: in the part that this rank holds."""

    text: str
    is_here: bool = True


def _first_on_this_rank(trainer: Any, micro_batches: list[Any]) -> _Found | None:
    for name, parameter in trainer.model.named_parameters():
        if not _is_finite(parameter):
            return _Found(f"the parameter {name} was not finite before the update", not _is_finite_here(parameter))
    first: _Found | None = None
    for micro, raw in enumerate(micro_batches):
        batch = trainer.gradients.to_device(raw)
        where = f" (micro-batch {micro + 1} of {len(micro_batches)})" if len(micro_batches) > 1 else ""
        bad_inputs = [name for name, tensor in batch.items() if not _is_finite(tensor)]
        found = _first_in_forward_and_backward(trainer, batch, micro)  # also with bad inputs: it may be collective
        if bad_inputs:
            found = _Found(f"the input {', '.join(bad_inputs)} of the batch is not finite: look at the data")
        if found is not None and (first is None or (found.is_here and not first.is_here)):
            first = _Found(found.text + where, found.is_here)
    return first


def _first_in_forward_and_backward(trainer: Any, batch: Batch, micro: int) -> _Found | None:
    outputs: list[tuple[str, flow.Tensor]] = []
    first: list[_Found] = []

    def watch(name: str, module: Any, _inputs: Any, output: Any) -> None:
        named = f"{name or 'the model'} ({type(module).__name__})"
        for tensor in tensors_in(output):
            if not first and not _is_finite(tensor):
                text = f"first the output of {named} is not finite"
                first.append(_Found(text, not _is_finite_here(tensor)))
            if tensor.requires_grad:
                outputs.append((named, tensor))

    with forward_hooks(trainer.model.named_modules(), watch):
        losses = trainer.gradients.forward_eagerly(batch, micro)
    if first:
        return first[0]
    bad_losses = [name for name, value in losses.items() if not _is_finite(value)]
    if bad_losses:
        text = f"the loss {', '.join(bad_losses)} is not finite, though every module's output is"
        return _Found(text, any(not _is_finite_here(losses[name]) for name in bad_losses))
    return _first_gradient(trainer, total_loss(losses), outputs)


def _first_gradient(trainer: Any, total: flow.Tensor, outputs: list[tuple[str, flow.Tensor]]) -> _Found | None:
    # from the loss backwards
    for name, tensor in reversed(outputs):
        gradient = _gradient(total, tensor)
        if gradient is not None and not _is_finite(gradient):
            text = f"first the gradient of the output of {name} is not finite, though the forward pass is"
            return _Found(text, not _is_finite_here(gradient))
    trainer.clear_gradients()
    total.backward()
    parameters = [(name, p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None]
    bad = {name: gradient for name, gradient in parameters if not _is_finite(gradient)}
    is_here = any(not _is_finite_here(gradient) for gradient in bad.values())
    trainer.clear_gradients()
    if not bad:
        return None
    text = f"the gradient of {', '.join(list(bad)[:3])} is not finite, though the forward pass is"
    return _Found(text, is_here)


def _gradient(total: flow.Tensor, tensor: flow.Tensor) -> flow.Tensor | None:
    """The gradient of `total`; None for a tensor that it does not depend on, for which OneFlow 0.9 raises."""
    try:
        return flow.autograd.grad(total, tensor, retain_graph=True)[0]
    except Exception:  # its exceptions have no common class but this one
        return None


def _is_finite(tensor: flow.Tensor) -> bool:
    """The same on every rank for a global tensor, whatever stage it is on: ranks that disagreed would diverge and
    wait for each other for ever. Collective then."""
    if not tensor.dtype.is_floating_point:
        return True
    return bool(np.isfinite(full_tensor(tensor).numpy()).all())


def _is_finite_here(tensor: flow.Tensor) -> bool:
    """Whether the part of a tensor that this rank holds is finite. Not collective."""
    part = part_here(tensor)
    return part is None or not part.dtype.is_floating_point or bool(np.isfinite(part.numpy()).all())
