"""Functions of `torch` that OneFlow 0.9.0 lacks or defines differently.

The public functions of this file are rows of the table in `names`; each docstring has the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import oneflow as flow

from libai.layers.random import in_forward, next_call_id, random_int32


def _creator(name: str, draw: Callable[[Any], Any] | None = None) -> Any:
    """Return `flow.<name>` with `size=`; in a forward pass, `draw` makes the values."""

    def created(*args: Any, size: Any = (), **kwargs: Any) -> Any:
        if draw is None or not in_forward():
            return getattr(flow, name)(*args, *size, **kwargs)
        return draw(flow.zeros(*args, *size, **kwargs))

    return created


def rand_like(input: Any, **options: Any) -> Any:
    """Missing: numbers in (0, 1) that depend on the forward pass and the call in it."""
    bits = random_int32(input, input.shape, next_call_id())
    return (bits.to(flow.float32) * 2.0**-32 + (0.5 + 2.0**-33)).to(input.dtype)


def randn_like(input: Any, **options: Any) -> Any:
    """Not seeded: normal numbers, by the method of Box and Muller."""
    radius = flow.sqrt(flow.log(rand_like(input)) * -2.0)
    return radius * flow.cos(rand_like(input) * (2.0 * math.pi))


zeros = _creator("zeros")
ones = _creator("ones")
empty = _creator("empty")
rand = _creator("rand", rand_like)
randn = _creator("randn", randn_like)


def outer(input: Any, vec2: Any) -> Any:
    """Missing."""
    return input.unsqueeze(1) * vec2


def norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False) -> Any:
    """Two axes are taken for a matrix."""
    return flow.linalg.vector_norm(input, 2.0 if p == "fro" else p, dim, keepdim)


def split(tensor: Any, split_size: Any, dim: int = 0) -> Any:
    """`split_size=` and a tuple of sizes are not accepted."""
    return flow.split(
        tensor, list(split_size) if isinstance(split_size, tuple) else split_size, dim
    )


def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    """A number makes the result float64."""
    tensors = [value for value in (input, other) if isinstance(value, flow.Tensor)]
    if input is None or len(tensors) == 2:
        return flow.where(condition, *tensors)
    dtype = tensors[0].dtype if tensors else flow.tensor([input, other]).dtype
    return flow.where(condition, input, other).to(dtype)


def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """The indices are int32."""
    return flow.argsort(input, dim, descending).long()


def argwhere(input: Any) -> Any:
    """The indices are int32."""
    return flow.argwhere(input).long()


def unique(input: Any, **options: Any) -> Any:
    """The other results are int32."""
    found = flow.unique(input, **options)
    if isinstance(found, flow.Tensor):
        return found
    return found[0], *(part.long() for part in found[1:])


def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """The indices are int32."""
    values, indices = flow.sort(input, dim, descending)
    return values, indices.long()
