"""Run a float32 model in float64, in place.

Parameters and buffers stay the same objects, so hooks, ties and closures still hold the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.rehearsal.view_writes import has_memory, share_memory
from libai.patches.wrapping import replaced, replaced_operations
from libai.utils.tensors import data_replaced

_SINGLE = flow.float32
#: parts of the names of operations that write to an argument, convert it, or sample
_LEFT_ALONE = (
    "assign",
    "update",
    "copy",
    "local_",
    "global",
    "rand",
    "normal",
    "bernoulli",
    "dropout",
    "cast",
    "set",
)
_IN_PLACE = ("isub", "imul", "itruediv", "iadd")
_NOT_COMPUTED = ("setitem", "to", "type_as", "numpy", "item")
_FACTORIES = ("zeros", "ones", "full", "eye", "linspace", "zeros_like", "ones_like", "arange")


def as_double(value: Any) -> Any:
    """Return a float32 tensor in float64, and anything else unchanged."""
    is_single = isinstance(value, flow.Tensor) and value.dtype == _SINGLE
    return value.to(flow.float64) if is_single else value


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Give the parameters and buffers of `model` float64 values, and make operations of the block
    compute in float64.

    `flow.float32` itself stays: code that compares a dtype with it chooses its kernels by that,
    and OneFlow's layer normalization in float64 ends the process.
    """
    with data_replaced([*model.parameters(), *model.buffers()], as_double):
        flow.set_default_dtype(flow.float64)
        try:
            with replaced_operations(_promoting), replaced(*_factories()):
                yield
        finally:
            flow.set_default_dtype(_SINGLE)


def _promoting(operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Return `operation`, but with float32 arguments in float64 if another argument is in float64.

    OneFlow refuses to mix them in many operations. Returns None for what must stay.
    """
    if name in _NOT_COMPUTED or any(part in name for part in _LEFT_ALONE):
        return None
    is_in_place = name.endswith("_") or name in _IN_PLACE
    first = 1 if is_in_place else 0  # a converted target would be a copy

    def promoted(*args: Any, **kwargs: Any) -> Any:
        if is_in_place:
            # `h.mul_(h[:1])` ends the process in float64
            args = (args[0], *(_apart(one, args[0]) for one in args[1:]))
        if any(map(_has_double, (*args, *kwargs.values()))):
            args = (*args[:first], *map(_as_doubles, args[first:]))
            kwargs = {key: _as_doubles(value) for key, value in kwargs.items()}
        return operation(*args, **kwargs)

    return promoted


def _apart(operand: Any, target: flow.Tensor) -> Any:
    """Return a copy of an operand that shares the memory of the target."""
    is_tensor = isinstance(operand, flow.Tensor) and has_memory(operand) and has_memory(target)
    return operand.clone() if is_tensor and share_memory(operand, target) else operand


def _has_double(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_double, value))
    return isinstance(value, flow.Tensor) and value.dtype == flow.float64


def _as_doubles(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(as_double, value))
    return as_double(value)


def _factories() -> list[tuple[Any, str, Any]]:
    """Return replacements for functions that make or convert float32 tensors."""
    to = flow.Tensor.to

    def converted(tensor: flow.Tensor, *args: Any, **kwargs: Any) -> flow.Tensor:
        kwargs = {key: _dtype(value) for key, value in kwargs.items()}
        return to(tensor, *map(_dtype, args), **kwargs)

    def tensor_of(make: Callable[..., Any], *args: Any, **kwargs: Any) -> flow.Tensor:
        made = as_double(make(*args, **kwargs))
        return made.requires_grad_(kwargs.get("requires_grad", False))

    def random(make: Callable[..., Any], *args: Any, **kwargs: Any) -> flow.Tensor:
        return as_double(make(*args, **{"dtype": _SINGLE, **kwargs}))  # samples as float32 would

    replacements = [
        (flow.Tensor, "float", lambda tensor: tensor.double()),
        (flow.Tensor, "to", converted),
        (flow, "tensor", partial(tensor_of, flow.tensor)),
        (flow, "from_numpy", partial(_made, flow.from_numpy)),
    ]
    replacements += [(flow, name, partial(_made, getattr(flow, name))) for name in _FACTORIES]
    return replacements + [
        (flow, name, partial(random, getattr(flow, name))) for name in ("rand", "randn")
    ]


def _made(make: Callable[..., Any], *args: Any, **kwargs: Any) -> flow.Tensor:
    return as_double(make(*args, **kwargs))


def _dtype(value: Any) -> Any:
    return flow.float64 if isinstance(value, flow.dtype) and value == _SINGLE else value
