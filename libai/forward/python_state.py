"""What a forward keeps in Python: attributes of modules, closures, globals, and the states of Python's random numbers.

A graph runs the Python code of a forward once, when it is traced, and a checkpoint holds none of this. So a state that
changes from call to call must be known before the first update. Values are compared, not objects.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import linecache
import random
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.oneflow_fixes.internals import FunctionContext
from libai.utils.tensors import local_part

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 5
#: kept by `nn.Module` itself
_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
#: parameters and modules are looked at elsewhere
# reading the `__dict__` of a context corrupts the memory of OneFlow 0.9.0
_NOT_COMPARED = (nn.Parameter, nn.Module, type(flow.default_generator), type, types.ModuleType, FunctionContext)
_CHANGING_METHODS = ("append", "extend", "add", "update", "pop", "clear")
PACKAGES = ("oneflow", "libai")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class _Place:
    """Where code outside of modules keeps a value: an attribute of `owner`, or an entry of it."""

    owner: Any
    name: str
    is_entry: bool = False

    def get(self) -> Any:
        if self.is_entry:
            return self.owner[self.name]
        return cell_value(self.owner) if isinstance(self.owner, types.CellType) else getattr(self.owner, self.name)

    def set(self, value: Any) -> None:
        if self.is_entry:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


def module_state(model: nn.Module) -> dict[str, Any]:
    """The plain attributes of every module of `model` by dotted name, as values that can be compared. Parameters,
    buffers and submodules are left out."""
    return {
        f"{path}.{name}" if path else name: fingerprint(value)
        for path, module in model.named_modules()
        for name, value in plain_attributes(module).items()
    }


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module` that are no parameters, buffers, submodules or hooks."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULE}


class SharedState:
    """What the code of `model` can change outside of its modules: class attributes, closures, globals, random states.

    `changed()` names what differs from when this was made, and `restore()` puts it back: variables and the contents of
    lists, dicts, sets and deques.
    """

    def __init__(self, model: nn.Module):
        self._places = dict(_places(model))
        self._values = {name: place.get() for name, place in self._places.items()}
        self._contents = {name: _copied(value) for name, value in self._values.items()}
        self._fingerprints = {name: fingerprint(value) for name, value in self._values.items()}
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=True)

    def changed(self, randoms: bool = True) -> list[str]:
        """What has changed, in words. `randoms`: random states as well, which others than the model use too."""
        names = [n for n, place in self._places.items() if fingerprint(place.get()) != self._fingerprints[n]]
        if not randoms:
            return names
        if random.getstate() != self._python:
            names.append("the state of Python's random numbers")
        if fingerprint(np.random.get_state(legacy=True)) != fingerprint(self._numpy):
            names.append("the state of NumPy's random numbers")
        return names

    def restore(self) -> None:
        """Put everything back."""
        for name, place in self._places.items():
            if fingerprint(place.get()) != self._fingerprints[name]:
                _refill(self._values[name], self._contents[name])
                place.set(self._values[name])
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def fingerprint(value: Any, depth: int = 0) -> Any:
    """A value that equals another one's when `value` holds the same. Parameters, modules and functions count as one."""
    if isinstance(value, _SIMPLE):
        return (type(value).__name__, value if value == value else "nan")
    if isinstance(value, _NOT_COMPARED) or depth > _MAX_DEPTH:
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
    if isinstance(value, random.Random):
        return ("random", value.getstate())
    if isinstance(value, np.random.Generator):
        return ("random", repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return ("random", repr(value.get_state()))
    if not callable(value) and hasattr(value, "__dict__"):
        return (type(value).__name__, fingerprint(vars(value), depth + 1))
    return type(value).__name__


def line_of(module: nn.Module, attribute: str) -> str:
    """Where the code of `module` writes its `attribute`: `file:line: code`; empty when that cannot be found."""
    for function, lines, first, tree in _code_of(type(module)):
        for node in ast.walk(tree):
            if _writes(node, attribute):
                number = node.lineno  # type: ignore[attr-defined]
                return f"{inspect.getsourcefile(function)}:{first + number - 1}: `{lines[number - 1].strip()}`"
    return ""


def has_code(module: nn.Module) -> bool:
    """Return whether the source of what users have written for `module` can be read."""
    return next(_code_of(type(module)), None) is not None


def writes_state(model: nn.Module) -> bool:
    """Whether the code of `model` has a statement that may change an attribute or a parameter. True without code."""
    for cls in {type(module) for module in model.modules()}:
        code = list(_code_of(cls))
        if any(_writes(node, None) for _, _, _, tree in code for node in ast.walk(tree)):
            return True
        if not code and cls.__module__.split(".")[0] not in PACKAGES:
            return True
    return any(hooks_of(module) or getattr(module, "max_norm", None) is not None for module in model.modules())


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


# ------------------------------------------------------------------------------------------------- places


def _places(model: nn.Module) -> Iterator[tuple[str, _Place]]:
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    for cls in classes:
        if cls is object or cls.__module__.split(".")[0] in PACKAGES:
            continue
        for name, value in list(vars(cls).items()):
            if isinstance(value, types.FunctionType):
                yield from _places_of_function(value)
            elif not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                yield f"the class attribute {cls.__name__}.{name}", _Place(cls, name)
    for path, module in model.named_modules():
        for value in list(vars(module).values()):
            if isinstance(value, types.FunctionType):
                yield from _places_of_function(value)
        for hook in hooks_of(module):
            yield from _places_of_hook(hook, path)


def _places_of_hook(hook: Any, path: str) -> Iterator[tuple[str, _Place]]:
    while isinstance(hook, functools.partial):
        bound = {"arguments": (hook.args, hook.keywords)}  # nothing can be assigned to them
        yield f"an argument bound to the hook of {path or 'the model'}", _Place(bound, "arguments", True)
        hook = hook.func
    if isinstance(hook, types.MethodType):
        if not isinstance(hook.__self__, nn.Module):
            yield from _places_of_object(hook.__self__, path)
        hook = hook.__func__
    if isinstance(hook, types.FunctionType):
        yield from _places_of_function(hook)
    elif hasattr(hook, "__dict__"):
        yield from _places_of_object(hook, path)
        yield from _places_of_function(type(hook).__call__)


def _places_of_object(owner: Any, path: str) -> Iterator[tuple[str, _Place]]:
    for name in vars(owner):
        yield f"{type(owner).__name__}.{name} of the hook of {path or 'the model'}", _Place(owner, name)


def is_users_code(code: types.CodeType, module: str) -> bool:
    """Whether `code` of a `module` is neither this project's nor OneFlow's, nor that of an installed package."""
    return module.split(".")[0] not in PACKAGES and not code.co_filename.startswith((*_INSTALLED, "<frozen"))


def is_users_frame(frame: types.FrameType) -> bool:
    """Whether a frame runs such code."""
    return is_users_code(frame.f_code, frame.f_globals.get("__name__", ""))


def describe_line(frame: types.FrameType) -> str:
    """`file:line: code` of what a frame is at."""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: `{linecache.getline(file, number).strip()}`"


def _places_of_function(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, _Place]]:
    """The globals and closures of a function and of the functions in them, but for those of installed packages."""
    code = getattr(function, "__code__", None)
    seen = set() if seen is None else seen
    if code is None or id(function) in seen or not is_users_code(code, function.__module__ or ""):
        return
    seen.add(id(function))
    variables = function.__globals__
    known = [*map(variables.get, code.co_names), *map(cell_value, function.__closure__ or ())]
    for called in [value for value in known if isinstance(value, types.FunctionType)]:
        yield from _places_of_function(called, seen)
    for name in code.co_names:
        if name in variables and not callable(variables[name]) and not isinstance(variables[name], types.ModuleType):
            yield f"the global {name} of {code.co_filename}", _Place(variables, name, True)
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        if name != "__class__":
            where = f"the variable {name} around {code.co_filename}:{code.co_firstlineno}"
            yield where, _Place(cell, "cell_contents")


def cell_value(cell: Any) -> Any:
    """What a variable of a closure holds; None where nothing has been assigned to it."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set | collections.deque) else None


def _refill(value: Any, contents: Any) -> None:
    if contents is not None:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(contents)
