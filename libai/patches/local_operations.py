"""Correct replacements for functions that OneFlow 0.9.0 computes wrongly, even for local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from libai.utils.errors import UserError


@functools.cache
def repair_operations() -> None:
    """Fix these functions from now on, for the whole process.

    `flow.empty` without a device uses the CPU of this rank, as all other functions do, instead of the CPU of rank 0.
    The gradient of `flow.diagonal` has the shape of its input, even if the two axes are not the first ones.
    `flow.einsum` raises `UserError` for an index that appears twice in a term (`bii->bi`), because the gradient would
    have the same error.
    """
    import oneflow as flow

    flow.empty = functools.wraps(flow.empty)(functools.partial(_empty, flow.empty))
    diagonal = functools.partial(_diagonal, flow._C.diagonal)
    flow.diagonal = functools.wraps(flow.diagonal)(diagonal)
    flow.Tensor.diagonal = lambda self, *args, **kwargs: diagonal(self, *args, **kwargs)
    flow.einsum = functools.wraps(flow.einsum)(functools.partial(_einsum, flow.einsum))


def _empty(operation: Callable[..., Any], *size: Any, **kwargs: Any) -> Any:
    if kwargs.get("placement") is None and kwargs.get("device") is None:
        kwargs["device"] = "cpu"
    return operation(*size, **kwargs)


def _diagonal(operation: Callable[..., Any], input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return the elements (i, i + offset) of two axes as the last axis, which replaces both."""
    axes = [dim1 % input.ndim, dim2 % input.ndim]
    others = [axis for axis in range(input.ndim) if axis not in axes]
    return operation(input.permute(*axes, *others), offset, 0, 1)


def _einsum(operation: Callable[..., Any], equation: str, *operands: Any) -> Any:
    terms = equation.partition("->")[0].replace(".", "").replace(" ", "").split(",")
    if any(len(set(term)) < len(term) for term in terms):
        raise UserError(
            f"flow.einsum({equation!r}) repeats an index within a term, for which OneFlow 0.9 computes a wrong "
            "gradient. Take the diagonal first: flow.diagonal(x, 0, axis, other_axis)."
        )
    return operation(equation, *operands)
