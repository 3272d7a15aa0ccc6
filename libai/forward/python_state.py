"""Python values that a forward reads and changes: attributes of modules, closures, globals and
random states.

A graph runs the Python code of a forward only once, when it is traced, and a checkpoint contains
none of these values. So a value that changes from call to call must be known before the first
update. A value that a hook changes must be known before the next update.
"""

from __future__ import annotations

import ast
import collections
import copy
import dis
import functools
import inspect
import io
import itertools
import os
import random
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.state import with_class
from libai.patches.internals import FunctionContext
from libai.patches.local_operations import hooks_of_parameter
from libai.utils.tensors import tensors_in

SIMPLE = (bool, int, float, complex, str, bytes, type(None))
#: largest number of containers and objects around a value that is compared, and that
#: `libai.forward.inventory` puts back
MAX_DEPTH = 6
#: attributes that `nn.Module` itself keeps
OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
#: types that are not compared. Parameters and modules are compared elsewhere. Reading the
#: `__dict__` of a function context corrupts the memory of OneFlow 0.9.0.
NOT_COMPARED = (
    nn.Parameter,
    nn.Module,
    flow.optim.Optimizer,
    type(flow.default_generator),
    type,
    types.ModuleType,
    FunctionContext,
)
CONTAINERS = (dict, list, set, collections.deque, tuple, frozenset)
#: generators of random numbers, whose states pickle reads and sets
RANDOM = (random.Random, np.random.RandomState, np.random.Generator)
PACKAGES = ("oneflow", "libai")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
#: packages with objects that contain the user's settings
_SETTINGS = ("types", "argparse", "omegaconf", "_thread", "_contextvars")
#: maximum number of entries of a container in which functions are looked for
_MAX_ENTRIES = 256


def _refuse(value: Any) -> None:
    raise AttributeError("a guard assigns nothing")


@dataclass(frozen=True)
class Variable:
    """A place with a value: an attribute, a global, a variable of a closure, or defaults.

    Attributes: name: its description. key: the name that code uses (several are separated by `|`).
        owner: the module, class or function that has the attribute, or None.
    """

    name: str
    read: Callable[[], Any]
    assign: Callable[[Any], None] = _refuse
    key: str = ""
    owner: Any = None


# ----------------------------------------------------------------------------------------------
# values


class Slots(MutableMapping[str, Any]):
    """The attributes of an object whose class has `__slots__`, by name."""

    def __init__(self, owner: Any):
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # a frozen dataclass refuses its own

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        names = (*_slots_of(self._owner.__class__), *getattr(self._owner, "__dict__", ()))
        return iter([name for name in names if hasattr(self._owner, name)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return dict(self)

    __copy__ = copy


@functools.cache
def _slots_of(cls: Any) -> list[str]:
    """Return the slots of a user's class."""
    slots = [vars(one).get("__slots__", ()) for one in cls.__mro__ if is_users(one.__module__)]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    return [name for name in names if not name.startswith("__")]


def container_in(value: Any) -> Any:
    """Return the container that holds the values one level inside `value`, or None if it has none.

    The container is `value` itself, the attributes of an object, or a tuple made for a partial or a
    method.
    """
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, ContextVar):
        return (value.get(None),)
    if _slots_of(value.__class__):
        return Slots(value)
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def values_in(container: Any) -> list[Any]:
    """Return the values in the result of `container_in`."""
    if container is None:
        return []
    return [*container.values()] if isinstance(container, Mapping) else [*container]


def depth_inside(value: Any, depth: int) -> int:
    """Return the depth of what is inside `value`, which is at `depth`.

    Objects of libraries count twice, because they often lead to many others.
    """
    return depth + (2 if is_of_library(value) else 1)


def is_of_library(value: Any) -> bool:
    """Return whether the class of an object belongs to a library, and not to one that keeps the
    user's settings.
    """
    if isinstance(value, (*CONTAINERS, functools.partial, types.MethodType)):
        return False
    module = type(value).__module__
    return module.split(".")[0] not in _SETTINGS and not is_users(module)


# ----------------------------------------------------------------------------------------------
# changes


def read_later(
    model: nn.Module, variables: Iterable[Variable], functions: Iterable[Any]
) -> list[str]:
    """Return the names of the `variables` whose values later calls may read.

    A counter that nothing reads is harmless, as is a tensor that every call creates again.
    `functions`: the user's functions that an update may run.
    """
    paths = {module: path for path, module in model.named_modules()}
    names = []
    for variable in variables:
        if variable.owner in paths:
            name = f"{paths[variable.owner]}.{variable.key}".lstrip(".")
            if _is_read_later(model, name, functions):
                names.append(with_class(model, name))
        elif _is_read(variable, functions):
            names.append(variable.name)
    return names


def _is_read(variable: Variable, functions: Iterable[Any]) -> bool:
    """Return whether a statement reads a variable outside the modules, and does not only change
    it.
    """
    name = rf"\.(?:{variable.key})\b"
    if variable.owner is None:
        name = rf"(?<![\w.])(?:{variable.key})\b"
    change = re.compile(rf"\s*((\w|\.|\[\w+\])*{name}(?!.* = .* = )|(def|global|nonlocal) )")
    read = re.compile(rf"{name}(?!(\[(''|\d+)\])?(: .*)? = )")
    for function in functions:
        if names_in(function).isdisjoint(variable.key.split("|")):
            continue
        if any(read.search(line) and not change.match(line) for line in _lines_in(function)):
            return True
    return False


@functools.cache
def names_in(function: types.FunctionType) -> frozenset[str]:
    """Return the names and strings in the code of a function and of the functions inside it."""
    names: set[str] = set()
    for code in _codes_in(function.__code__):
        names.update(code.co_names, code.co_freevars, code.co_cellvars, code.co_varnames)
        names.update(one for one in code.co_consts if isinstance(one, str))
    return frozenset(names)


def _is_read_later(model: nn.Module, name: str, functions: Iterable[Any]) -> bool:
    """Return whether code of `model` reads the value that an earlier call gave to an attribute.

    Some reads do not count: a read in a statement that also changes the attribute; reads of a
    tensor that no statement computes from its own value, because every call makes it again; and
    reads of a list or dict that `forward` or a hook empties first.
    """
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules())[path]
    # `self.seen.append(1)`, `self.table[key].count += 1`; but `self.n = n = self.n + 1` also passes
    # the value on
    change = re.compile(rf"\s*(\w|\.|\[\w+\])*\.{attribute}\b(?!.* = .* = )")
    is_read = False
    is_kept = not tensors_in(vars(module)[attribute])
    hooks = "|".join(
        getattr(hook, "__name__", "") for one in model.modules() for hook in hooks_of(one)
    )
    start = rf"^def (?:forward|{hooks})\(.*\n(?:    (?!.*\.{attribute}\b).*\n)*"
    empty = rf"{start}    \w+\.{attribute}(?:\.clear\(\)| = (?:\[\]|{{}}))$"
    sources = []
    methods: set[Any] = set()
    for cls in {type(one) for one in model.modules()}:
        is_own = issubclass(type(module), cls) or issubclass(cls, type(module))
        lines = _lines_of(cls)  # type: ignore[arg-type]  # a class is hashable
        if is_own and re.search(empty, "\n".join(lines), re.MULTILINE):
            return False
        sources.append((is_own, lines))
        methods.update(_function_in(value) for base in cls.__mro__ for value in vars(base).values())
    for function in functions:
        if function not in methods and attribute in names_in(function):
            sources.append((True, _lines_in(function)))
    for is_own, lines in sources:
        # `self` in an unrelated class is another module. A write with a constant key is not a read
        # (strings are empty here); a write with any other key may grow a dict
        read = re.compile(
            rf"{'' if is_own else '(?<!self)'}\.{attribute}\b(?!(\[(''|\d+)\])?(: .*)? = )"
        )
        for line in filter(read.search, lines):
            if change.match(line) is None:
                is_read = True
            elif is_own:
                is_kept = True
    return is_read and is_kept


@functools.cache
def _lines_of(cls: type) -> list[str]:
    """Return the lines of a class's user-defined methods except constructors."""
    lines = []
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in PACKAGES:
            continue
        for function in map(_function_in, vars(base).values()):
            if function is not None and function.__name__ not in ("__init__", "__setstate__"):
                lines += _lines_in(function)
    return lines


#: `getattr(x, "name")`, `vars(x)["name"]` and `x.__dict__["name"]`: other spellings of `x.name`
_BY_NAME = re.compile(
    r"""(?:getattr\((\w+), |vars\((\w+)\)\[|\b(\w+)\.__dict__\[)["'](\w+)["'](?:, [^()]*)?[])]"""
)


@functools.cache
def _lines_in(function: types.FunctionType) -> list[str]:
    """Return the lines of a function: one line per statement, empty strings, and attributes instead
    of `getattr`.

    A function without source, such as one that was typed into a shell, counts as reading its names.
    """
    try:
        source = _BY_NAME.sub(r"\1\2\3.\4", textwrap.dedent(inspect.getsource(function)))
        tree = ast.parse(source)
    # TypeError: a function that wraps a compiled one; SyntaxError: a lambda that is only a part of
    # an expression
    except (OSError, TypeError, SyntaxError):
        code = function.__code__
        names = [f"return self.{name}" for name in code.co_names]
        return names + [f"return {name}" for name in (*code.co_names, *code.co_freevars)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree).splitlines()


# ----------------------------------------------------------------------------------------------
# variables


def functions_of(model: nn.Module) -> list[Any]:
    """Return what an update of `model` may run: methods, hooks, and functions in attributes of its
    modules.
    """
    found = []
    for module in model.modules():
        found += [*hooks_of(module), *vars(module).values()]
    for parameter in model.parameters():
        found += hooks_of_parameter(parameter)
    for kind in dict.fromkeys(map(type, model.modules())):
        for cls in kind.__mro__:
            found += vars(cls).values()
    return found


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield `code`, and the code of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def variables_of(functions: Iterable[Any], seen: set[Any] | None = None) -> Iterator[Variable]:
    """Yield the globals and closure variables that the user's functions use.

    Functions that these functions name are searched too, except the functions in `seen`, to which
    all that are searched are added.
    """
    seen = set() if seen is None else seen
    waiting = [*functions]
    known = set()  # ids of containers
    for value in waiting:  # the list grows in the loop
        if isinstance(value, CONTAINERS):
            if len(value) <= _MAX_ENTRIES and id(value) not in known:
                known.add(id(value))
                waiting += values_in(value)
            continue
        function = _function_in(value)
        if function is None or function in seen or not is_users(function.__module__ or ""):
            continue
        seen.add(function)
        waiting += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        variables = function.__globals__
        for code in _codes_in(function.__code__):
            owners = []
            names = code.co_names
            texts = [one for one in code.co_consts if isinstance(one, str) and one.isidentifier()]
            if "globals" in names:
                names += tuple(texts)
                for text in texts:
                    if text not in variables:
                        yield Variable(
                            f"the global {text}",
                            functools.partial(variables.get, text),
                            functools.partial(variables.__setitem__, text),
                        )
            if "environ" in names or "getenv" in names:
                for text in texts:
                    yield Variable(
                        f"the environment variable {text}",
                        functools.partial(_environment, text),
                        functools.partial(_set_environment, text),
                    )
            scopes = [(code.co_filename, variables, variables.__setitem__, None)]
            for place, scope, assign, owner in scopes:  # the list grows in the loop
                for name in filter(scope.__contains__, names):
                    value = scope[name]
                    waiting.append(value)
                    if _has_names_of_user(value) and value not in owners:
                        owners.append(value)
                        scopes.append(
                            (value.__name__, vars(value), functools.partial(setattr, value), value)
                        )
                    if not isinstance(value, types.ModuleType):
                        yield Variable(
                            f"the global {name} of {place}",
                            functools.partial(scope.get, name),
                            functools.partial(assign, name),
                            name,
                            owner,
                        )
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name != "__class__" and cell != types.CellType():  # an empty cell has no value yet
                waiting.append(cell.cell_contents)
                yield Variable(
                    f"the variable {name} around {function.__qualname__}",
                    functools.partial(cell_value, cell),
                    functools.partial(setattr, cell, "cell_contents"),
                    name,
                )


def _environment(name: str) -> str | None:
    """Return an environment variable, as the same object for the same value."""
    value = os.environ.get(name)
    return None if value is None else sys.intern(value)


def _set_environment(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def compares_identity(functions: Iterable[Any]) -> bool:
    """Return whether code of `functions` may tell two equal objects apart: with `is` (except for
    None, True and False), `id` or `operator.is_`.
    """
    for function in functions:
        for code in _codes_in(function.__code__):
            if not {"id", "is_", "is_not"}.isdisjoint(code.co_names):
                return True
            steps = [*dis.get_instructions(code)]
            for before, step in itertools.pairwise(steps):
                is_singleton = before.opname == "LOAD_CONST" and before.argval in (
                    None,
                    True,
                    False,
                )
                if step.opname == "IS_OP" and not is_singleton:
                    return True
    return False


def owners_of(function: types.FunctionType) -> list[Any]:
    """Return the globals of a user's function, and the user's classes, functions and modules that
    it names: code may add attributes to them.
    """
    scope = function.__globals__
    named = {name for code in _codes_in(function.__code__) for name in code.co_names}
    values = [scope[name] for name in scope.keys() & named]
    values += map(cell_value, function.__closure__ or ())
    owners = [function, *filter(_has_names_of_user, values)]
    return [scope, *(vars(one) if isinstance(one, types.ModuleType) else one for one in owners)]


def _has_names_of_user(value: Any) -> bool:
    """Return whether `value` is a module, class or function of the user, whose attributes code may
    read.
    """
    is_owner = isinstance(value, types.ModuleType | types.FunctionType | type)
    return is_owner and is_users(getattr(value, "__module__", value.__name__) or "")


def cell_value(cell: types.CellType) -> Any:
    """Return what a variable of a closure holds, or None if it has no value yet."""
    return cell.cell_contents if cell != types.CellType() else None


def _function_in(value: Any) -> types.FunctionType | None:
    """Return the Python function that `value` is, wraps (partial, property or method), or runs when
    it is called.
    """
    for name in ("func", "fget", "__func__"):
        value = getattr(value, name, value)
    if not isinstance(value, types.FunctionType | type):
        value = vars(type(value)).get("__call__")
    return value if isinstance(value, types.FunctionType) else None


@functools.cache
def is_users(module: str) -> bool:
    """Return whether a module belongs to the user: not to Python, OneFlow, libai or an installed
    package.
    """
    top = module.split(".")[0]
    if top in PACKAGES or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not file.startswith(_INSTALLED)


# ----------------------------------------------------------------------------------------------
# hooks and iterators


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward hooks of one module, pre-hooks first."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def cannot_go_back(value: Any) -> bool:
    """Return whether `value` is an iterator that cannot be copied, such as a generator or an open
    file.
    """
    return is_iterator(value) and copy_of_iterator(value) is value


def copy_of_iterator(value: Any) -> Any:
    """Return a copy of an iterator, which keeps its position when `value` advances.

    Other values, and iterators that cannot be copied, are returned as they are.
    """
    if not is_iterator(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # deepcopy may raise anything
        return value


def is_iterator(value: Any) -> bool:
    """Return whether `value` is an iterator, such as a generator or a file that is read."""
    if not hasattr(type(value), "__next__"):
        return False
    return not isinstance(value, io.IOBase) or (not value.closed and value.readable())
