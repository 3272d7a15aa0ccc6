"""What a forward keeps in Python: attributes of modules, closures, globals, and the states of Python's random numbers.

A graph runs the Python code of a forward once, when it is traced, and a checkpoint holds none of this. So a state that
changes from call to call must be known before the first update. Values are compared, not objects.
"""

from __future__ import annotations

import ast
import collections
import copy
import functools
import inspect
import random
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.patches.internals import FunctionContext
from libai.utils.tensors import local_part, tensors_in

SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 5
#: kept by `nn.Module` itself
_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
#: parameters and modules are looked at elsewhere
# reading the `__dict__` of a context corrupts the memory of OneFlow 0.9.0
NOT_COMPARED = (
    nn.Parameter,
    nn.Module,
    flow.optim.Optimizer,
    type(flow.default_generator),
    type,
    types.ModuleType,
    FunctionContext,
)
#: class of generators → how their state is read, and set
RANDOM_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
_CHANGING_METHODS = ("append", "extend", "add", "update", "pop", "clear")
PACKAGES = ("oneflow", "libai")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module` that are no parameters, buffers, submodules or hooks."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULE}


def switches_of(model: nn.Module) -> frozenset[Any]:
    """Return the texts and truth values in plain attributes of the modules of `model`, and which numbers are zero."""
    found = set()
    for path, module in model.named_modules():
        for name, value in plain_attributes(module).items():
            if value is None or isinstance(value, (str, bool)):
                found.add((path, name, value))
            elif isinstance(value, (int, float)):
                found.add((path, name, "zero" if value == 0 else "number"))
    return frozenset(found)


class PythonState:
    """The plain attributes of the modules of `model`, as they were when this was made."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = self._now()

    def changed(self, is_read: bool = True) -> list[str]:
        """Return, in words with their lines, the attributes that have changed since; if `is_read`, those of them that
        a later call may read.

        A number that is only counted up and read nowhere is nobody's business, nor a new tensor of every call.
        """
        now = self._now()
        modules = dict(self._model.named_modules())
        found = []
        for name in now:
            path, _, attribute = name.rpartition(".")
            module = modules[path]
            if name not in self._before or now[name] == self._before[name]:
                continue
            if is_read and tensors_in(vars(module)[attribute]) and not _is_made_of_itself(module, attribute):
                continue
            if not is_read or is_read_elsewhere(self._model, module, attribute):
                line = line_of(module, attribute)
                found.append(f"{name} ({', '.join(filter(None, [type(module).__name__, line]))})")
        return found

    def _now(self) -> dict[str, Any]:
        values = {}
        for path, module in self._model.named_modules():
            for name, value in plain_attributes(module).items():
                values[f"{path}.{name}" if path else name] = fingerprint(value)
        return values


def fingerprint(value: Any, depth: int = 0) -> Any:
    """A value that equals another one's when `value` holds the same. Parameters, modules and functions count as one."""
    if isinstance(value, SIMPLE):
        return (type(value).__name__, value if value == value else "nan")
    if isinstance(value, NOT_COMPARED) or depth > _MAX_DEPTH:
        return type(value).__name__
    if isinstance(value, flow.Tensor):
        if value.is_lazy:
            return ("traced", id(value))
        local = local_part(value)
        return ("tensor", tuple(local.shape), local.numpy().tobytes())
    if isinstance(value, np.ndarray | np.generic):
        return ("array", value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", *((fingerprint(k, depth + 1), fingerprint(v, depth + 1)) for k, v in value.items()))
    if isinstance(value, list | tuple | collections.deque):
        return (type(value).__name__, *(fingerprint(item, depth + 1) for item in value))
    if isinstance(value, set | frozenset):
        return ("set", frozenset(fingerprint(item, depth + 1) for item in value))
    if type(value) in RANDOM_STATES:
        return ("random", repr(RANDOM_STATES[type(value)][0](value)))
    if not callable(value) and hasattr(value, "__dict__"):
        return (type(value).__name__, fingerprint(vars(value), depth + 1))
    if _is_iterator(value) and not cannot_go_back(value):
        return (type(value).__name__, fingerprint(value.__reduce__()[1:], depth + 1))  # where it stands
    return type(value).__name__


def line_of(module: nn.Module, attribute: str) -> str:
    """Where the code of `module` writes its `attribute`: `file:line: code`; empty when that cannot be found."""
    for function, lines, first, tree in _code_of(type(module)):
        for node in ast.walk(tree):
            if _writes(node, attribute):
                number = node.lineno  # type: ignore[attr-defined]
                return f"{inspect.getsourcefile(function)}:{first + number - 1}: `{lines[number - 1].strip()}`"
    return ""


def is_read_elsewhere(model: nn.Module, module: nn.Module, attribute: str) -> bool:
    """Return whether code of `model` reads this `attribute` of `module` in statements that do not write it."""
    own = list(_code_of(type(module)))
    if not own and type(module).__module__.split(".")[0] not in PACKAGES:
        return True  # nobody knows
    for cls in {type(one) for one in model.modules()}:
        for _, _, _, tree in _code_of(cls):
            is_own = issubclass(type(module), cls) or issubclass(cls, type(module))
            if _reads(tree, attribute, is_own):
                return True
    return False


def _is_made_of_itself(module: nn.Module, attribute: str) -> bool:
    """Return whether a statement of `module` computes its `attribute` from its present value."""
    for _, _, _, tree in _code_of(type(module)):
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and _mentions(node.target, attribute):
                return True
            if isinstance(node, ast.Assign) and _writes(node, attribute) and _mentions(node.value, attribute):
                return True
            if isinstance(node, ast.Call) and _writes(node, attribute):
                return True
    return False


def _reads(node: ast.AST, attribute: str, of_self: bool) -> bool:
    """Return whether `node` reads `<something>.<attribute>`; of another object than `self` unless `of_self`."""
    if _writes(node, attribute):
        return False
    if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load):
        is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if of_self or not is_self:
            return True
    return any(_reads(child, attribute, of_self) for child in ast.iter_child_nodes(node))


def _code_of(cls: type) -> Iterator[tuple[types.FunctionType, list[str], int, ast.AST]]:
    """`(function, its lines, number of the first, syntax tree)` of what users have written for modules of a class, but
    for constructors."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in PACKAGES:
            continue
        for function in [f for f in vars(base).values() if isinstance(f, types.FunctionType)]:
            if function.__name__ in ("__init__", "__setstate__"):
                continue
            try:
                lines, first = inspect.getsourcelines(function)
                yield function, lines, first, ast.parse(textwrap.dedent("".join(lines)))
            except (OSError, SyntaxError, TypeError):
                continue


def _writes(node: ast.AST, attribute: str | None) -> bool:
    """Whether a statement assigns `<something>.<attribute>`, a part of it, or calls a method of it that changes it;
    None: any attribute, and a method of anything."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(_mentions(target, attribute) for target in targets)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changes = node.func.attr.endswith("_") or node.func.attr in _CHANGING_METHODS
        return changes and (attribute is None or _mentions(node.func.value, attribute))
    return False


def _mentions(node: ast.AST, attribute: str | None) -> bool:
    return any(isinstance(part, ast.Attribute) and attribute in (None, part.attr) for part in ast.walk(node))


def hooks_of(module: nn.Module) -> list[Any]:
    """The forward hooks of one module, those before its forward first."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextmanager
def forward_hooks(modules: Iterable[tuple[str, nn.Module]], call: Callable[..., None]) -> Iterator[None]:
    """Inside, `call(name, module, inputs, outputs)` follows each forward of the named `modules`.

    OneFlow 0.9 returns no handle to take a hook off by.
    """
    before = []
    for name, module in modules:
        before.append((module._forward_hooks, dict(module._forward_hooks)))
        module.register_forward_hook(functools.partial(call, name))
    try:
        yield
    finally:
        for hooks, own in before:
            hooks.clear()
            hooks.update(own)


def is_users_code(code: types.CodeType, module: str) -> bool:
    """Whether `code` of a `module` is neither this project's nor OneFlow's, nor that of an installed package."""
    return module.split(".")[0] not in PACKAGES and not code.co_filename.startswith((*_INSTALLED, "<frozen"))


def is_users_frame(frame: types.FrameType) -> bool:
    """Whether a frame runs such code."""
    return is_users_code(frame.f_code, frame.f_globals.get("__name__", ""))


def cell_value(cell: Any) -> Any:
    """What a variable of a closure holds; None where nothing has been assigned to it."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def cannot_go_back(value: Any) -> bool:
    """Return whether `value` is an iterator without a copy, such as a generator or an open file."""
    return _is_iterator(value) and copy_of_iterator(value) is value


def copy_of_iterator(value: Any) -> Any:
    """Return a copy of an iterator, which stays where it is while the other goes on; everything else as it is."""
    if not _is_iterator(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever deepcopy raises for a value
        return value


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")
