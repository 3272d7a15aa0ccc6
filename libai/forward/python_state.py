"""Python values that a forward reads and changes: attributes of modules, closures, globals and random states.

A graph runs the Python code of a forward only once, when it is traced, and a checkpoint contains none of these values.
So a value that changes from call to call must be known before the first update. A value that a hook changes must be
known before the next update.
"""

from __future__ import annotations

import collections
import copy
import dis
import functools
import random
import sys
import sysconfig
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
#: attributes that `nn.Module` itself keeps
OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
#: types that are not compared. Parameters and modules are compared elsewhere. Reading the `__dict__` of a function
#: context corrupts the memory of OneFlow 0.9.0.
NOT_COMPARED = (
    nn.Parameter,
    nn.Module,
    flow.optim.Optimizer,
    type(flow.default_generator),
    type,
    types.ModuleType,
    FunctionContext,
)
#: generator class → (function that reads its state, function that sets it)
RANDOM_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
#: methods that change a list, dict or set
_CHANGING_METHODS = ("append", "extend", "add", "update", "pop", "clear")
PACKAGES = ("oneflow", "libai")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
#: packages with objects that contain the user's settings
_SETTINGS = ("types", "argparse", "omegaconf")
#: guards inspect containers, arrays and tensors with up to this many entries
_MAX_ENTRIES = 256
#: guards inspect up to this many containers, arrays and tensors
_MAX_WATCHED = 50
#: `(function that returns a copy, copy)` of the contents of a container, array or tensor
Watched = list[tuple[Callable[[], Any], Any]]


# ------------------------------------------------------------------------------------------------- values


def fingerprint(value: Any, watched: Watched | None = None, depth: int = 0) -> Any:
    """Return a fingerprint of `value`. Two values with the same contents have equal fingerprints.

    `watched`: for a guard, receives the containers, arrays and tensors that were inspected, none of them large. A value
    that is not inspected is then identified by its `id`, and without `watched` only by its type.
    """
    kind = type(value).__name__
    unknown = kind if watched is None else (kind, "id", id(value))
    if isinstance(value, SIMPLE):
        return (kind, value if value == value else "nan")
    if isinstance(value, NOT_COMPARED) or depth > _MAX_DEPTH:
        return unknown
    if type(value) in RANDOM_STATES:
        return ("random", repr(RANDOM_STATES[type(value)][0](value)))
    if isinstance(value, types.FunctionType) and watched is not None:
        return unknown
    if isinstance(value, types.FunctionType | types.MethodType):
        return (value.__qualname__, getattr(value, "__code__", None))  # a method of `functools.lru_cache` has none
    if _is_iterator(value) and not cannot_go_back(value):
        return (kind, fingerprint(value.__reduce__()[1:], watched, depth + 1))  # its position
    size, read = _contents_of(value, watched is not None)
    if read is None:
        return unknown
    if watched is not None and not isinstance(value, tuple | frozenset):
        if size > _MAX_ENTRIES or len(watched) >= _MAX_WATCHED:
            return unknown
        watched.append((read, read()))
    contents = read()
    if isinstance(contents, bytes):
        return (kind, tuple(value.shape), str(value.dtype), contents)
    if isinstance(contents, set | frozenset):
        return (kind, frozenset(fingerprint(item, watched, depth + 1) for item in contents))
    items = [part for item in contents.items() for part in item] if isinstance(contents, dict) else contents
    return (kind, *(fingerprint(item, watched, depth + 1) for item in items))


def _contents_of(value: Any, is_guard: bool) -> tuple[int, Callable[[], Any] | None]:
    """Return the size of a container, array, tensor or object, and a function that copies its contents.

    The function is None if `value` cannot be inspected. A guard inspects objects of the user's classes and of settings
    libraries. It does not inspect a tensor if another device or rank has a part of it.
    """
    if isinstance(value, flow.Tensor):
        is_elsewhere = value.is_lazy or is_guard and (value.is_global or value.is_cuda)
        return value.numel(), None if is_elsewhere else lambda: local_part(value).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return value.size, value.tobytes
    if isinstance(value, tuple | frozenset):
        return len(value), lambda: value
    if isinstance(value, dict | list | set | collections.deque):
        return len(value), value.copy
    if isinstance(value, functools.partial):
        return 3, lambda: (value.func, value.args, value.keywords)
    module = type(value).__module__
    is_known = module.split(".")[0] in _SETTINGS or is_users(module) if is_guard else not callable(value)
    if is_known and isinstance(getattr(value, "__dict__", None), dict):
        return len(vars(value)), vars(value).copy
    return 0, None


# ------------------------------------------------------------------------------------------------- changes


class PythonState:
    """A snapshot of the plain attributes of the modules of `model`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = self._now()

    def changed(self) -> list[str]:
        """Return the attributes (with their classes) that have changed since, and that a later call may read.

        A counter that nothing reads does no harm, and neither does a tensor that every call creates again.
        """
        modules = dict(self._model.named_modules())
        found = []
        for name, value in self._now().items():
            path, _, attribute = name.rpartition(".")
            is_changed = name in self._before and value != self._before[name]
            if is_changed and _is_read_later(self._model, modules[path], attribute):
                found.append(f"{name} ({type(modules[path]).__name__})")
        return found

    def _now(self) -> dict[str, Any]:
        values = {}
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name not in OF_MODULE:
                    values[f"{path}.{name}" if path else name] = fingerprint(value)
        return values


#: bytecode of a statement: `(operation, its name, name in the previous operation)`
_Line = list[tuple[str, Any, Any]]
#: operations that end a statement, so that `self.n += 1; h = h * self.n` is two
_ENDS = ("STORE_ATTR", "STORE_FAST", "STORE_SUBSCR", "POP_TOP", "RETURN_VALUE", "RAISE_VARARGS")


def _lines_of(cls: type) -> Iterator[_Line]:
    """Yield the bytecode of the statements in the user's methods of a class, except its constructors."""
    for base in cls.__mro__:
        for function in vars(base).values():
            is_method = isinstance(function, types.FunctionType) and base.__module__.split(".")[0] not in PACKAGES
            if not is_method or function.__name__ in ("__init__", "__setstate__"):
                continue
            for code in _codes_in(function.__code__):
                line: _Line = []
                operation, before = "", None
                for instruction in dis.get_instructions(code):
                    # the header of an `if` ends with its line; other statements may have several lines
                    if operation in _ENDS or ("JUMP" in operation and instruction.starts_line is not None):
                        yield line
                        line = []
                    operation = instruction.opname
                    line.append((operation, instruction.argval, before))
                    before = instruction.argval
                yield line


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield `code`, and the code of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _reads(line: _Line, attribute: str, of_self: bool) -> bool:
    """Return whether a line reads `<something>.<attribute>`.

    Without `of_self`, reads of `self.<attribute>` do not count.
    """
    return any(
        kind in ("LOAD_ATTR", "LOAD_METHOD") and name == attribute and (of_self or before != "self")
        for kind, name, before in line
    )


def _writes(line: _Line, attribute: str, has_items: bool) -> bool:
    """Return whether a line assigns the attribute that it reads, or an item of it, or calls a method that changes it.

    `has_items`: whether items of the attribute can be assigned. If not, an assigned item belongs to another value.
    """
    for kind, name, before in line:
        is_changing = kind == "LOAD_METHOD" and (name.endswith("_") or name in _CHANGING_METHODS)
        is_set = (kind == "STORE_ATTR" and name == attribute) or (kind == "STORE_SUBSCR" and has_items)
        if is_set or (is_changing and before == attribute):
            return True
    return False


def _is_read_later(model: nn.Module, module: nn.Module, attribute: str) -> bool:
    """Return whether code of `model` reads the value that an earlier call gave to `attribute` of `module`.

    A line that also writes the attribute does not count. Tensors that no line computes from their own value do not
    count either, because every call makes them again.
    """
    value = vars(module)[attribute]
    is_read = False
    is_kept = not tensors_in(value)
    for cls in {type(one) for one in model.modules()}:
        is_own = issubclass(type(module), cls) or issubclass(cls, type(module))
        for line in _lines_of(cls):
            if not _reads(line, attribute, is_own):
                continue
            if _writes(line, attribute, hasattr(value, "__setitem__")):
                is_kept = is_kept or is_own
            else:
                is_read = True
    return is_read and is_kept


# ------------------------------------------------------------------------------------------------- variables


def functions_of(model: nn.Module) -> list[Any]:
    """Return what a call of `model` may run: methods, hooks, and functions in attributes of its modules."""
    found: list[Any] = []
    classes: dict[type, None] = {}
    for module in model.modules():
        found += [*hooks_of(module), *vars(module).values()]
        classes.update(dict.fromkeys(type(module).__mro__))
    for cls in classes:
        found += vars(cls).values()
    return found


def variables_of(
    functions: Iterable[Any], seen: set[Any] | None = None
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Yield `(description, read, assign)` of the globals and closure variables that the user's functions use.

    Functions that these functions name are searched too, except the functions in `seen`.
    """
    seen = set() if seen is None else seen
    waiting = [*functions]
    for value in waiting:  # the list grows in the loop
        function = _function_in(value)
        if function is None or function in seen or not is_users(function.__module__ or ""):
            continue
        seen.add(function)
        variables = function.__globals__
        for code in _codes_in(function.__code__):
            owners: list[Any] = []
            scopes: list[Any] = [(code.co_filename, variables, variables.__setitem__)]
            for place, scope, assign in scopes:  # the list grows in the loop
                for name in filter(scope.__contains__, code.co_names):
                    value = scope[name]
                    waiting.append(value)
                    if _has_names_of_user(value) and value not in owners:
                        owners.append(value)
                        scopes.append((value.__name__, vars(value), functools.partial(setattr, value)))
                    if not isinstance(value, types.ModuleType) and not hasattr(value, "__get__"):
                        where = f"the global {name} of {place}"
                        yield where, functools.partial(scope.get, name), functools.partial(assign, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name != "__class__" and cell != types.CellType():  # an empty cell has no value yet
                waiting.append(cell.cell_contents)
                where = f"the variable {name} around {function.__qualname__}"
                yield where, functools.partial(cell_value, cell), functools.partial(setattr, cell, "cell_contents")


def _has_names_of_user(value: Any) -> bool:
    """Return whether `value` is a module, class or function of the user, whose attributes code may read."""
    is_owner = isinstance(value, types.ModuleType | types.FunctionType | type)
    return is_owner and is_users(getattr(value, "__module__", value.__name__) or "")


def cell_value(cell: types.CellType) -> Any:
    """Return what a variable of a closure holds, or None if it has no value yet."""
    return cell.cell_contents if cell != types.CellType() else None


def _function_in(value: Any) -> types.FunctionType | None:
    """Return the Python function that `value` is, wraps (partial, property or method), or runs when it is called."""
    for name in ("func", "fget", "__func__"):
        value = getattr(value, name, value)
    if not isinstance(value, types.FunctionType | type):
        value = vars(type(value)).get("__call__")
    return value if isinstance(value, types.FunctionType) else None


@functools.cache
def is_users(module: str) -> bool:
    """Return whether a module belongs to the user: not to Python, OneFlow, libai or an installed package."""
    top = module.split(".")[0]
    if top in PACKAGES or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not file.startswith(_INSTALLED)


def is_users_frame(frame: types.FrameType) -> bool:
    """Return whether a frame runs the user's code."""
    return is_users(frame.f_globals.get("__name__", ""))


# ------------------------------------------------------------------------------------------------- hooks and iterators


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward hooks of one module, pre-hooks first."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextmanager
def forward_hooks(modules: Iterable[tuple[str, nn.Module]], call: Callable[..., None]) -> Iterator[None]:
    """Call `call(name, module, inputs, outputs)` after each forward of the named `modules` in the block.

    The block removes the hooks itself, because OneFlow 0.9 returns no handle for that.
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


def cannot_go_back(value: Any) -> bool:
    """Return whether `value` is an iterator that cannot be copied, such as a generator or an open file."""
    return _is_iterator(value) and copy_of_iterator(value) is value


def copy_of_iterator(value: Any) -> Any:
    """Return a copy of an iterator, which keeps its position when `value` advances.

    Other values, and iterators that cannot be copied, are returned as they are.
    """
    if not _is_iterator(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # deepcopy may raise anything
        return value


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")
