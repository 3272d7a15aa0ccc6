"""Correct replacements for operations whose gradient OneFlow 0.9.0 computes wrongly, for local
tensors in both modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import oneflow as flow

from libai.patches.wrapping import repair
from libai.utils.errors import UserError

#: log(2 pi) / 2
_HALF_LOG_2_PI = 0.9189385332046727
#: a shift from which on the asymptotic series of log gamma has the digits of float64
_SHIFT = 10


def _lgamma(operation: Callable[..., Any], x: flow.Tensor, **kwargs: Any) -> flow.Tensor:
    """Return log gamma, whose gradient OneFlow 0.9.0 sets to 0.

    The value is OneFlow's. The gradient is that of Stirling's series at x + 10, less the logarithms
    of x, x + 1, …, x + 9. It is NaN for x <= -10.
    """
    value = operation(x, **kwargs)
    if not (x.requires_grad and flow.is_grad_enabled()):
        return value
    z = x + _SHIFT
    product = x
    for number in range(1, _SHIFT):
        product = product * (x + number)
    series = (z - 0.5) * flow.log(z) - z + _HALF_LOG_2_PI
    series = series + 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5)
    smooth = series - flow.log(flow.abs(product))
    return smooth + (value - smooth).detach()


def _scatter(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> flow.Tensor:
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, flow.Tensor)]
    is_product = kwargs.get("reduce") == "multiply" or "multiply" in args[4:]
    if is_product and flow.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise UserError(
            'flow.scatter(h, dim, index, source, reduce="multiply") has a wrong gradient in '
            "OneFlow 0.9. For an index without duplicates, compute the products first: "
            "flow.scatter(h, dim, index, flow.gather(h, dim, index) * source)."
        )
    return operation(*args, **kwargs)


def _hardtanh(
    operation: Callable[..., Any], x: flow.Tensor, *args: Any, **kwargs: Any
) -> flow.Tensor:
    """In float64, OneFlow's gradient ignores the lower bound."""
    if x.dtype != flow.float64:
        return operation(x, *args, **kwargs)
    low, high = (*args, *kwargs.values()) or (-1.0, 1.0)
    return flow.clamp(x, low, high)


def _fill_(
    operation: Callable[..., Any], tensor: flow.Tensor, value: float | None = None
) -> flow.Tensor:
    """Fill a tensor and zero its gradient, which OneFlow 0.9.0 passes on.

    OneFlow also fills the elements after the first one of a view, whatever its strides.
    """
    is_whole = tensor.is_global or tensor.is_lazy or tensor.is_contiguous()
    if is_whole and not _has_gradient(tensor):
        return operation(tensor) if value is None else operation(tensor, value)
    return _assign(tensor, flow.zeros_like(tensor) + (value or 0))


def _copy_(
    operation: Callable[..., Any], tensor: flow.Tensor, other: Any, *args: Any
) -> flow.Tensor:
    """Copy the history of `other` too, which OneFlow 0.9.0 leaves out."""
    if not _has_gradient(tensor) and not _has_gradient(other):
        return operation(tensor, other, *args)
    return _assign(tensor, other)


def _with_itself(
    operation: Callable[..., Any], tensor: flow.Tensor, *operands: Any, **kwargs: Any
) -> flow.Tensor:
    """Compute a square first: OneFlow 0.9.0 saves the operands after they have changed."""
    if _has_gradient(tensor) and any(operand is tensor for operand in operands):
        copy = tensor.clone()  # the backward pass reads it
        return _assign(tensor, copy * copy)
    return operation(tensor, *operands, **kwargs)


def _has_gradient(tensor: Any) -> bool:
    is_tracked = isinstance(tensor, flow.Tensor) and tensor.requires_grad
    return is_tracked and flow.is_grad_enabled()


def _assign(tensor: flow.Tensor, value: flow.Tensor) -> flow.Tensor:
    tensor[...] = value
    return tensor


_METHODS: dict[str, Callable[..., Any]] = {
    "scatter": _scatter,
    "zero_": _fill_,
    "fill_": _fill_,
    "copy_": _copy_,
    "mul_": _with_itself,
    "__imul__": _with_itself,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lgamma": _lgamma,
    "scatter": _scatter,
    "hardtanh": _hardtanh,
}


@functools.cache
def repair_gradients() -> None:
    """Fix these functions from now on, for the whole process.

    `lgamma` gets its gradient, and `hardtanh` the right one in float64. `scatter` raises
    `UserError` for a product with a gradient. `h.zero_()`, `h.fill_(0)`, `h.copy_(s)` and `h *= h`
    pass on the gradients of `h[...] = value`, and fill only the elements of a view.
    """
    for owner in (flow, flow._C, flow.nn.functional):
        repair(owner, _FUNCTIONS)
    repair(flow.Tensor, _METHODS)
