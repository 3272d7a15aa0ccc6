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
import random
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.state import with_class
from libai.patches.internals import FunctionContext
from libai.patches.local_operations import hooks_of_parameter
from libai.utils.tensors import local_part, tensors_in

SIMPLE = (bool, int, float, complex, str, bytes, type(None))
#: largest number of containers and objects around a value that is compared, and that
#: `libai.engine.rehearsal.kept` puts back
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
_SETTINGS = ("types", "argparse", "omegaconf")
#: maximum number of entries of a container, array or tensor that a guard inspects
_MAX_ENTRIES = 256
#: maximum number of containers, arrays and tensors that a guard inspects
_MAX_WATCHED = 50
#: `(function that returns a copy, copy)` of the contents of a container, array or tensor
Watched = list[tuple[Callable[[], Any], Any]]
#: `(id, depth)` of a value → the value and its fingerprint
Known = dict[tuple[int, int], tuple[Any, Any]]


# ----------------------------------------------------------------------------------------------
# values


def fingerprint(value: Any, watched: Watched | None = None, by_identity: bool = False) -> Any:
    """Return a fingerprint of `value`. Two values with the same contents have equal fingerprints.

    `watched`: for a guard, receives the containers, arrays and tensors that were inspected, none of
    them large. A value that is not inspected is then identified by its `id`, and without `watched`
    only by its type. `by_identity`: values with the same contents differ if they are not the same
    objects.
    """
    return _fingerprint(value, watched, by_identity, 0, {})


def _fingerprint(
    value: Any, watched: Watched | None, by_identity: bool, depth: int, known: Known
) -> Any:
    """Return the fingerprint of a value inside `depth` containers.

    `known`: fingerprints found so far. Objects that refer to each other would otherwise be read
    again on every path between them.
    """
    kind = type(value).__name__
    if isinstance(value, SIMPLE):
        return (kind, value if value == value else "nan", by_identity and id(value))
    if isinstance(value, NOT_COMPARED) or depth > MAX_DEPTH:
        return kind if watched is None else (kind, "id", id(value))
    key = (id(value), depth)
    if key not in known:
        # keeps the value alive, because the id of a freed one could be reused
        found = _fingerprint_of_contents(value, watched, by_identity, depth, known)
        # objects of a class without `__eq__` are never equal; a method is a new object at each read
        is_plain = is_users(type(value).__module__) and type(value).__eq__ is object.__eq__
        is_itself = watched is not None and not isinstance(value, types.MethodType)
        is_itself = is_itself and (by_identity or is_plain)
        known[key] = (value, (found, is_itself and id(value)))
    return known[key][1]


def _fingerprint_of_contents(
    value: Any, watched: Watched | None, by_identity: bool, depth: int, known: Known
) -> Any:
    kind = type(value).__name__
    unknown = kind if watched is None else (kind, "id", id(value))
    if type(value) in RANDOM:
        return ("random", repr(value.__getstate__()))
    if isinstance(value, types.FunctionType):
        return unknown if watched is not None else (value.__qualname__, value.__code__)
    if isinstance(value, types.MethodType) and watched is not None:
        # a method of `functools.lru_cache` has no code
        return (value.__qualname__, getattr(value, "__code__", None))
    if is_iterator(value) and not cannot_go_back(value):
        position = value.__reduce__()[1:]
        return (kind, _fingerprint(position, watched, False, depth + 1, known))
    size, read = _contents_of(value, watched is not None)
    if read is None:
        return unknown
    if watched is not None and not isinstance(value, tuple | frozenset):
        if size > _MAX_ENTRIES or len(watched) >= _MAX_WATCHED:
            return unknown
        watched.append((read, read()))
        if by_identity and isinstance(container_in(value), dict | list):
            ids = functools.partial(_ids_in, container_in(value))
            watched.append((ids, ids()))
    contents = read()
    if isinstance(contents, bytes):
        return (kind, tuple(value.shape), str(value.dtype), contents)
    items = [*contents, *contents.values()] if isinstance(contents, dict) else contents
    inside = depth_inside(value, depth)
    parts = [_fingerprint(item, watched, by_identity, inside, known) for item in items]
    return (kind, frozenset(parts) if isinstance(contents, set | frozenset) else tuple(parts))


def _contents_of(value: Any, is_guard: bool) -> tuple[int, Callable[[], Any] | None]:
    """Return the size of a container, array, tensor or object, and a function that copies its
    contents.

    The function is None if `value` cannot be inspected. A guard inspects objects of the user's
    classes and of settings libraries. It does not inspect a tensor if another device or rank has a
    part of it.
    """
    if isinstance(value, flow.Tensor):
        is_elsewhere = value.is_lazy or is_guard and (value.is_global or value.is_cuda)
        return value.numel(), None if is_elsewhere else lambda: local_part(value).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return value.size, value.tobytes
    held = container_in(value)
    if held is None or (is_guard and is_of_library(value)):
        return 0, None
    return len(held), (lambda: held) if isinstance(held, tuple | frozenset) else held.copy


def container_in(value: Any) -> Any:
    """Return the container that holds the values one level inside `value`, or None if it has none.

    The container is `value` itself, the `__dict__` of an object, or a tuple made for a partial or a
    method.
    """
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def _ids_in(container: dict[Any, Any] | list[Any]) -> list[int]:
    return [*map(id, container.values() if isinstance(container, dict) else container)]


def values_in(container: Any) -> list[Any]:
    """Return the values in the result of `container_in`."""
    if container is None:
        return []
    return [*container.values()] if isinstance(container, dict) else [*container]


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


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Return the fingerprints of the plain attributes of `model` and its submodules, by dotted
    name.
    """
    values = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_MODULE:
                values[f"{path}.{name}" if path else name] = fingerprint(value)
    return values


def changed_since(before: dict[str, Any], model: nn.Module) -> list[str]:
    """Return the attributes (with their classes) that differ from `before`, and that a later call
    may read.

    A counter that nothing reads is harmless, as is a tensor that every call creates again.
    """
    return [
        with_class(model, name)
        for name, value in attributes_of(model).items()
        if before.get(name, value) != value and _is_read_later(model, name)
    ]


def _is_read_later(model: nn.Module, name: str) -> bool:
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
    for cls in {type(one) for one in model.modules()}:
        is_own = issubclass(type(module), cls) or issubclass(cls, type(module))
        lines = _lines_of(cls)  # type: ignore[arg-type]  # a class is hashable
        if is_own and re.search(empty, "\n".join(lines), re.MULTILINE):
            return False
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
    """Return the lines of a class's user-defined methods except constructors: one line per
    statement, empty strings.

    A method without source, such as one that was typed into a shell, counts as reading its
    attributes.
    """
    lines = []
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in PACKAGES:
            continue
        for function in map(_function_in, vars(base).values()):
            if function is None or function.__name__ in ("__init__", "__setstate__"):
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            # TypeError: a function that wraps a compiled one; SyntaxError: a lambda that is only
            # a part of an expression
            except (OSError, TypeError, SyntaxError):
                lines += [f"return self.{name}" for name in function.__code__.co_names]
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    node.value = ""
            lines += ast.unparse(tree).splitlines()
    return lines


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


def variables_of(
    functions: Iterable[Any], seen: set[Any] | None = None
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Yield `(description, read, assign)` of the globals and closure variables that the user's
    functions use.

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
            scopes = [(code.co_filename, variables, variables.__setitem__)]
            for place, scope, assign in scopes:  # the list grows in the loop
                for name in filter(scope.__contains__, code.co_names):
                    value = scope[name]
                    waiting.append(value)
                    if _has_names_of_user(value) and value not in owners:
                        owners.append(value)
                        scopes.append(
                            (value.__name__, vars(value), functools.partial(setattr, value))
                        )
                    if not isinstance(value, types.ModuleType):
                        where = f"the global {name} of {place}"
                        yield (
                            where,
                            functools.partial(scope.get, name),
                            functools.partial(assign, name),
                        )
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name != "__class__" and cell != types.CellType():  # an empty cell has no value yet
                waiting.append(cell.cell_contents)
                where = f"the variable {name} around {function.__qualname__}"
                yield (
                    where,
                    functools.partial(cell_value, cell),
                    functools.partial(setattr, cell, "cell_contents"),
                )


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
