"""What a forward keeps in Python: attributes of modules, closures, globals, and the states of Python's random numbers.

A graph runs the Python code of a forward once, when it is traced, and a checkpoint holds none of this. So a state that
changes from call to call must be known before the first update. Values are compared, not objects.
"""

from __future__ import annotations

import ast
import collections
import copy
import functools
import gc
import inspect
import random
import sys
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

from libai.patches.internals import FunctionContext
from libai.utils.tensors import local_part, tensors_in

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 5
#: kept by `nn.Module` itself
_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
#: parameters and modules are looked at elsewhere
# reading the `__dict__` of a context corrupts the memory of OneFlow 0.9.0
_NOT_COMPARED = (
    nn.Parameter,
    nn.Module,
    flow.optim.Optimizer,
    type(flow.default_generator),
    type,
    types.ModuleType,
    FunctionContext,
)
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


class SharedState:
    """State that code can change outside of modules: class attributes, closures, globals, hook objects, and the
    random states of Python and NumPy.

    `restore()` puts back what differs from when this was made: variables, and the contents of containers and objects.
    """

    def __init__(self, places: Iterable[tuple[str, _Place]]):
        self._places = dict(places)
        self._values = {name: copy_of_iterator(place.get()) for name, place in self._places.items()}
        self._contents = {name: contents_of(value) for name, value in self._values.items()}
        self._fingerprints = {name: fingerprint(value) for name, value in self._values.items()}
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=True)

    @classmethod
    def of_model(cls, model: nn.Module) -> SharedState:
        """Keep what the code of `model`'s modules and of their forward hooks can change."""
        return cls(_places(model))

    @classmethod
    def of_functions(cls, functions: Iterable[Any]) -> SharedState:
        """Keep the closures and globals of `functions`."""
        found = []
        for number, function in enumerate(functions):
            found += [(f"{number} {name}", place) for name, place in _places_of_function(function)]
        return cls(found)

    def restore(self) -> None:
        """Put everything back."""
        for name, place in self._places.items():
            if fingerprint(place.get()) != self._fingerprints[name]:
                self._contents[name]()
                place.set(copy_of_iterator(self._values[name]))
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def lasting_iterators(model: nn.Module, functions: Iterable[Any]) -> list[str]:
    """Return the names of what holds an iterator that nothing can put back, of the code of `model` and `functions`."""
    places = list(_places(model))
    for function in functions:
        places += _places_of_function(function)
    return [name for name, place in places if cannot_go_back(place.get())]


class CalledFunctions:
    """The user's functions that run while `watching` is on, such as hooks of gradients, of which OneFlow has no list.

    `restore()` puts back what they had in closures and globals before their first call.
    """

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self._kept: list[SharedState] = []
        self._known: set[types.CodeType] = set()

    def watch(self) -> None:
        """Begin to watch, unless somebody else does; ends with `stop`."""
        if sys.getprofile() is None:
            sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop watching; free when nobody watches."""
        if sys.getprofile() == self._note:
            sys.setprofile(None)

    def restore(self) -> None:
        """Put everything back."""
        for kept in self._kept:
            kept.restore()

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code in self._known:
            return
        self._known.add(frame.f_code)
        if is_users_frame(frame):
            found = [one for one in gc.get_referrers(frame.f_code) if isinstance(one, types.FunctionType)]
            self.functions += found
            self._kept.append(SharedState.of_functions(found))


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
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            yield f"a default argument of {code.co_filename}:{code.co_firstlineno}", _Place(function, name)
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


def contents_of(value: Any, depth: int = 0) -> Callable[[], None]:
    """Return a function that gives `value`, a plain object, its present contents again, in place."""
    if depth > _MAX_DEPTH or isinstance(value, (*_SIMPLE, *_NOT_COMPARED)):
        return _nothing
    if isinstance(value, flow.Tensor):
        return _nothing if value.is_lazy else functools.partial(_put_values, value, value.detach().clone())
    if isinstance(value, np.ndarray):
        return functools.partial(np.copyto, value, value.copy()) if value.flags.writeable else _nothing
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, dict):
        inner = [contents_of(item, depth + 1) for item in value.values()]
        return functools.partial(_refill, value, value.update, dict(value), inner)
    if isinstance(value, set):
        return functools.partial(_refill, value, value.update, set(value), [])
    if isinstance(value, list | collections.deque):
        inner = [contents_of(item, depth + 1) for item in value]
        return functools.partial(_refill, value, value.extend, list(value), inner)
    if isinstance(value, tuple):
        inner = [contents_of(item, depth + 1) for item in value]
        return functools.partial(_restore_all, inner)
    if not callable(value) and hasattr(value, "__dict__"):
        return contents_of(vars(value), depth + 1)
    return _nothing


def _nothing() -> None:
    pass


def _put_values(tensor: flow.Tensor, values: flow.Tensor) -> None:
    if not np.array_equal(local_part(tensor).numpy(), local_part(values).numpy(), equal_nan=tensor.is_floating_point()):
        with flow.no_grad():
            tensor.data.copy_(values)


def _refill(value: Any, fill: Callable[[Any], None], contents: Any, inner: list[Callable[[], None]]) -> None:
    value.clear()
    fill(contents)
    _restore_all(inner)


def _restore_all(inner: list[Callable[[], None]]) -> None:
    for restore in inner:
        restore()
