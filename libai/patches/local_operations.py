"""Functions that OneFlow 0.9.0 gets wrong with any tensor, local ones too, made of others that are right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def repair_operations() -> None:
    """From now on, in this process:

    `flow.empty` takes the rank's device where none is asked for, as all other functions do, and not that of rank 0.
    The gradient of `flow.diagonal` has the shape of its input where the two axes are not the first ones; `flow.einsum`
    with an index twice in a term (`bii->bi`) reads diagonals that way.
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
    """The elements (i, i + offset) of two axes, as the last axis, in place of both."""
    dim1, dim2 = dim1 % input.ndim, dim2 % input.ndim
    rows, columns = input.shape[dim1], input.shape[dim2]
    others = [axis for axis in range(input.ndim) if axis not in (dim1, dim2)]
    start = offset if offset >= 0 else -offset * columns
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    end = start + (count - 1) * (columns + 1) + 1 if count else start
    flat = input.permute(*others, dim1, dim2).reshape(*[input.shape[axis] for axis in others], rows * columns)
    return flat[..., start : end : columns + 1]


def _einsum(operation: Callable[..., Any], equation: str, *operands: Any) -> Any:
    """Each index that a term has twice becomes one, of a diagonal."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if "." in terms or all(len(set(term)) == len(term) for term in terms.split(",")):
        return operation(equation, *operands)
    if not arrow:
        result = "".join(sorted(index for index in set(terms) - {","} if terms.count(index) == 1))
    reduced = [_without_repeats(term, tensor) for term, tensor in zip(terms.split(","), operands)]
    return operation(f"{','.join(term for term, _ in reduced)}->{result}", *[tensor for _, tensor in reduced])


def _without_repeats(term: str, tensor: Any) -> tuple[str, Any]:
    while repeated := next((index for index in term if term.count(index) > 1), ""):
        first = term.index(repeated)
        second = term.index(repeated, first + 1)
        tensor = _diagonal(tensor, 0, first, second)
        term = term[:first] + term[first + 1 : second] + term[second + 1 :] + repeated
    return term, tensor
