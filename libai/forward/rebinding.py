"""Functions that know modules or tensors from elsewhere, made to know their stand-ins: those of a copy, or of a trace.

A forward hook may hold a module of its model, or a parameter, in its closure, in a global name, in an argument that
`functools.partial` has bound, or as an attribute of a callable object. `copy.deepcopy` copies no function, and a graph
knows nothing of it, so such a hook would continue with the tensors of the original.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.forward.python_state import cell_value

Replace = Callable[[Any], Any]
#: containers in containers, functions in functions: deeper than this nobody hides a module
_MAX_DEPTH = 6


def rebound(value: Any, replace: Replace, depth: int = 0) -> Any:
    """`value` with each module or tensor in it passed through `replace`; `value` itself where that changes nothing."""
    if isinstance(value, (nn.Module, flow.Tensor)):
        return replace(value)
    if depth >= _MAX_DEPTH:
        return value

    def inner(part: Any) -> Any:
        return rebound(part, replace, depth + 1)

    if isinstance(value, types.MethodType):
        owner = inner(value.__self__)
        function = inner(value.__func__)
        return value if owner is value.__self__ and function is value.__func__ else function.__get__(owner)
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, inner)
    if isinstance(value, functools.partial):
        parts = (inner(value.func), inner(value.args), inner(value.keywords))
        is_same = all(a is b for a, b in zip(parts, (value.func, value.args, value.keywords)))
        return value if is_same else functools.partial(parts[0], *parts[1], **parts[2])
    if type(value) in (list, tuple):
        items = [inner(item) for item in value]
        return value if all(a is b for a, b in zip(items, value)) else type(value)(items)
    if type(value) is dict:
        entries = {key: inner(item) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if callable(value) and not isinstance(value, type) and isinstance(getattr(value, "__dict__", None), dict):
        return _rebound_object(value, inner)
    return value


def _rebound_function(function: types.FunctionType, inner: Replace) -> types.FunctionType:
    cells = [cell_value(cell) for cell in function.__closure__ or ()]
    changed = [inner(content) for content in cells]
    names = _global_names(function.__code__)
    spaces = {name: function.__globals__[name] for name in names if name in function.__globals__}
    # only what is a module or a tensor itself: functions of a file know each other
    other = {n: v for n, v in spaces.items() if isinstance(v, (nn.Module, flow.Tensor)) and inner(v) is not v}
    defaults = inner(function.__defaults__) if function.__defaults__ else function.__defaults__
    if not other and defaults is function.__defaults__ and all(a is b for a, b in zip(changed, cells)):
        return function
    closure = tuple(
        cell if new is old else types.CellType(new)
        for cell, old, new in zip(function.__closure__ or (), cells, changed)
    )
    known: dict[str, Any] = {**function.__globals__, **{name: inner(value) for name, value in other.items()}}
    made = types.FunctionType(
        function.__code__, known if other else function.__globals__, function.__name__, defaults, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__ and inner(function.__kwdefaults__)
    return made


def _rebound_object(value: Any, inner: Replace) -> Any:
    attributes = {name: inner(item) for name, item in vars(value).items()}
    if all(attributes[name] is item for name, item in vars(value).items()):
        return value
    made = copy.copy(value)
    vars(made).update(attributes)
    return made


def _global_names(code: types.CodeType) -> set[str]:
    inside = [_global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*inside)
