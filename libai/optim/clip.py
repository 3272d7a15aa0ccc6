"""Compute the global gradient norm and clip gradients by norm or by value, in eager mode.

OneFlow's `optimizer.clip_grad()` clips each parameter group by its own norm.
`flow.nn.utils.clip_grad_norm_` sums the squares sequentially in float32, so for a gradient of 4M
elements its norm is off by 0.2 %. Here a single norm covers all groups and is computed from many
partial sums (relative error 1e-7). Nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import oneflow as flow

from libai.native.kernels import are_kernels_on
from libai.optim.joined import are_joinable, joined_sum_of_squares

_EPSILON = 1e-6  # as in OneFlow and PyTorch: keeps the coefficient finite for a zero norm


def clip_grad_norm(parameters: Iterable[flow.Tensor], max_norm: float) -> flow.Tensor:
    """Scale all gradients in place by `min(1, max_norm / (norm + 1e-6))` and return the norm before
    scaling.

    Args:
        parameters: parameters of all groups, local or global. Those with `grad` None are skipped.
        max_norm: maximum norm, above 0.

    Returns: A 0-dim tensor on the device: 0 if there are no gradients, and global if the gradients
        are. Collective for global parameters: every rank must call it. A non-finite norm makes the
        gradients non-finite.
    """
    parameters = list(parameters)
    norm, coefficient = norm_and_coefficient(parameters, max_norm)
    with flow.no_grad():
        for group in _by_layout(_gradients(parameters)):
            here = coefficient
            if coefficient.is_global and coefficient.placement != group[0].placement:
                here = coefficient.to_global(placement=group[0].placement)
            for gradient in group:
                gradient.mul_(here)
    return norm


def clip_grad_value(parameters: Iterable[flow.Tensor], limit: float) -> None:
    """Clamp every element of the gradients to the range ±`limit`, in place."""
    with flow.no_grad():
        for gradient in _gradients(parameters):
            gradient.copy_(gradient.clamp(-limit, limit))


def norm_and_coefficient(
    parameters: Iterable[flow.Tensor], max_norm: float
) -> tuple[flow.Tensor, flow.Tensor]:
    """Return the norm of `clip_grad_norm` and its scaling factor, without changing the
    gradients.
    """
    with flow.no_grad():
        norm = joint_norm(_gradients(parameters))
        return norm, (float(max_norm) / (norm + _EPSILON)).clamp(max=1.0)


def _gradients(parameters: Iterable[flow.Tensor]) -> list[flow.Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    return [gradient for gradient in gradients if gradient is not None]


def joint_norm(gradients: list[flow.Tensor]) -> flow.Tensor:
    """Return the 2-norm over all elements of `gradients`, or of other tensors, as a 0-dim tensor on
    the device.
    """
    if not gradients:
        return flow.tensor(0.0)
    # Communicate once per layout instead of once per tensor: tensors of equal layout stay partial
    # sums until combined.
    parts = [_sum_of_squares(group) for group in _by_layout(gradients)]
    if gradients[0].is_global:
        placement = gradients[0].placement
        broadcast = [flow.sbp.broadcast] * len(gradients[0].sbp)
        if len(parts) > 1 and all(part.placement == placement for part in parts):
            # each rank adds its own parts first, in the order of libai.patches.job.clip.order_norms
            own = [flow.sbp.partial_sum] * len(broadcast)
            parts = [flow.stack([part.to_global(sbp=own) for part in parts]).sum()]
        parts = [part.to_global(sbp=[flow.sbp.broadcast] * len(part.sbp)) for part in parts]
        parts = [part.to_global(placement=placement, sbp=broadcast) for part in parts]
    total = parts[0] if len(parts) == 1 else flow.stack(parts).sum()
    return total.sqrt()


def _sum_of_squares(tensors: list[flow.Tensor]) -> flow.Tensor:
    """Return the sum of squares over all elements of `tensors`, which must have the same layout."""
    if are_joinable(tensors) or _are_joinable_parts(tensors):
        return joined_sum_of_squares(tensors)
    return flow.stack([flow.square(tensor).sum().to(tensors[0].dtype) for tensor in tensors]).sum()


def _are_joinable_parts(tensors: list[flow.Tensor]) -> bool:
    """Return True if the joined sum supports these global tensors: float32 on CPU, whole or split
    over ranks.
    """
    if not (are_kernels_on() and tensors[0].is_global and tensors[0].placement.type == "cpu"):
        return False
    return (
        all(tensor.dtype == flow.float32 for tensor in tensors)
        and flow.sbp.partial_sum not in tensors[0].sbp
    )


def _by_layout(gradients: list[flow.Tensor]) -> list[list[flow.Tensor]]:
    """Group gradients by placement and sbp. Local gradients form a single group."""
    if not gradients or not gradients[0].is_global:
        return [gradients] if gradients else []
    groups: dict[Any, list[flow.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.placement, tuple(gradient.sbp)), []).append(gradient)
    return [groups[layout] for layout in sorted(groups, key=lambda layout: str(layout[1]))]
