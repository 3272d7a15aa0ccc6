"""Corrections of rarely used operations that OneFlow 0.9.0 computes wrongly, or that end the
process. PyTorch and NumPy have the right values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from libai.utils.errors import UserError


@functools.cache
def repair_values() -> None:
    """Fix these operations from now on, for the whole process.

    `layer_norm` applies a weight without a bias. `%` and `//` of negative numbers follow Python's
    signs. `roll` counts negative axes from the end. `&`, `|` and `^` of integers, which OneFlow
    computes as logical operations, raise `UserError`. `orthogonal_` changes its tensor.
    None in the size of `adaptive_avg_pool2d`, and gradients of a vector in `matmul` and of a
    transposed convolution with a frozen weight, do not end the process.
    """
    import oneflow as flow
    from oneflow.nn import functional
    from oneflow.nn.modules import normalization

    from libai.patches.wrapping import repair, repaired

    flow.matmul = flow._C.matmul = repaired(_matmul, flow._C.matmul)
    repair(flow.Tensor, {"matmul": _matmul, "__matmul__": _matmul})
    normalization.layer_norm = functools.partial(_layer_norm, normalization.layer_norm)
    functional.layer_norm = normalization.layer_norm
    roll = functools.wraps(flow.roll)(functools.partial(_roll, flow._C.roll))
    flow.roll = roll
    flow.Tensor.roll = lambda self, *args, **kwargs: roll(self, *args, **kwargs)
    flow.Tensor.__mod__ = _remainder
    flow.Tensor.__floordiv__ = _operator(_quotient, flow.Tensor.__floordiv__)
    flow.Tensor.orthogonal_ = _operator(_orthogonal, flow.Tensor.orthogonal_)
    for name in ("__and__", "__or__", "__xor__"):
        setattr(flow.Tensor, name, _operator(_logical, getattr(flow.Tensor, name)))
    functional.adaptive_avg_pool2d = functools.partial(_pool, functional.adaptive_avg_pool2d)
    for number in (1, 2, 3):
        operation = getattr(flow._C, f"deconv{number}d")
        transposed = functools.wraps(operation)(functools.partial(_transposed, operation))
        setattr(flow._C, f"deconv{number}d", transposed)
        setattr(functional, f"conv_transpose{number}d", transposed)


def _operator(repaired: Callable[..., Any], operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda one, other: repaired(operation, one, other)


def _layer_norm(
    operation: Callable[..., Any],
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if weight is None or bias is not None:
        return operation(input, normalized_shape, weight, bias, eps)
    return operation(input, normalized_shape, None, None, eps) * weight


def _roll(operation: Callable[..., Any], input: Any, shifts: Any, dims: Any = None) -> Any:
    if dims is not None:
        axes = [dims] if isinstance(dims, int) else dims
        dims = [axis % input.ndim for axis in axes]
        shifts = [shifts] if isinstance(shifts, int) else shifts
    return operation(input, shifts, dims)


def _remainder(x: Any, divisor: Any) -> Any:
    """Return the remainder with the sign of `divisor`."""
    rest = x.fmod(divisor)
    return rest + (rest * divisor < 0).to(rest.dtype) * divisor


def _quotient(operation: Callable[..., Any], x: Any, divisor: Any) -> Any:
    quotient = operation(x, divisor)
    if x.is_floating_point():
        return quotient
    return quotient - (x.fmod(divisor) * divisor < 0).to(quotient.dtype)


def _logical(operation: Callable[..., Any], x: Any, other: Any) -> Any:
    from oneflow import Tensor
    from oneflow import bool as boolean

    kinds = {value.dtype for value in (x, other) if isinstance(value, Tensor)}
    if boolean not in kinds:
        raise UserError(
            "`&`, `|` or `^` of integer tensors: OneFlow 0.9.0 computes a logical operation, not "
            "one of bits. For single bits, write x // 2**n % 2."
        )
    return operation(x, other)


def _orthogonal(operation: Callable[..., Any], x: Any, gain: float) -> Any:
    """Fill `x`, which OneFlow leaves as it is."""
    return x.copy_(operation(x, gain).to(x.dtype))


def _matmul(
    operation: Callable[..., Any], input: Any, other: Any, *args: Any, **options: Any
) -> Any:
    """Make a matrix of a vector if the other operand has more than two axes."""
    if other.ndim == 1 and input.ndim > 2:
        return operation(input, other.unsqueeze(1)).squeeze(-1)
    if input.ndim == 1 and other.ndim > 2:
        return operation(input.unsqueeze(0), other).squeeze(-2)
    return operation(input, other, *args, **options)


def _pool(operation: Callable[..., Any], input: Any, output_size: Any) -> Any:
    if isinstance(output_size, (tuple, list)):
        sizes = zip(output_size, input.shape[-2:])
        output_size = [own if size is None else size for size, own in sizes]
    return operation(input, output_size)


def _transposed(
    operation: Callable[..., Any], input: Any, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    if input.requires_grad and not weight.requires_grad:
        weight = weight.detach().requires_grad_()
    return operation(input, weight, *args, **kwargs)
