"""Replace functions that OneFlow 0.9.0 computes wrongly for any tensor, even local ones, by correct combinations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from libai.utils.errors import UserError


@functools.cache
def repair_operations() -> None:
    """Fix these functions from now on, for the whole process.

    `flow.empty` without a device uses the rank's device, as all other functions do, instead of the device of rank 0.
    The gradient of `flow.diagonal` has the shape of its input, even if the two axes are not the first ones.
    `flow.einsum` raises `UserError` for an index that appears twice in a term (`bii->bi`), because its gradient has the
    same error.
    """
    import oneflow as flow

    flow.empty = functools.wraps(flow.empty)(functools.partial(_empty, flow.empty))
    flow.diagonal = flow.Tensor.diagonal = _diagonal
    flow.einsum = functools.wraps(flow.einsum)(functools.partial(_einsum, flow.einsum))


def _empty(operation: Callable[..., Any], *size: Any, **kwargs: Any) -> Any:
    if kwargs.get("placement") is None and kwargs.get("device") is None:
        kwargs["device"] = "cpu"
    return operation(*size, **kwargs)


def _diagonal(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return the elements (i, i + offset) of two axes as the last axis, which replaces both."""
    dim1, dim2 = dim1 % input.ndim, dim2 % input.ndim
    rows, columns = input.shape[dim1], input.shape[dim2]
    others = [axis for axis in range(input.ndim) if axis not in (dim1, dim2)]
    start = offset if offset >= 0 else -offset * columns
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    end = start + (count - 1) * (columns + 1) + 1 if count else start
    flat = input.permute(*others, dim1, dim2).reshape(*[input.shape[axis] for axis in others], rows * columns)
    return flat[..., start : end : columns + 1]


def _einsum(operation: Callable[..., Any], equation: str, *operands: Any) -> Any:
    terms = equation.partition("->")[0].replace(".", "").replace(" ", "").split(",")
    if any(len(set(term)) < len(term) for term in terms):
        raise UserError(
            f"flow.einsum({equation!r}) has an index twice in a term: OneFlow 0.9 computes a wrong gradient for it. "
            "Take the diagonal first: flow.diagonal(x, 0, axis, other_axis)."
        )
    return operation(equation, *operands)
