"""An inventory of the Python values that code can read and change: attributes, class attributes,
closures, globals, and the contents of containers and objects.

It is walked once, with one depth, and has three uses: `restore` puts the values back, `changed`
names the ones that differ (`libai.engine.rehearsal`), and the guards of a compiled graph ask the
same of the values that forward reads (`libai.engine.compiled.guards`).
"""

from __future__ import annotations

import collections
import copy
import gc
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.python_state import (
    MAX_DEPTH,
    NOT_COMPARED,
    OF_MODULE,
    RANDOM,
    SIMPLE,
    Slots,
    Variable,
    cannot_go_back,
    container_in,
    copy_of_iterator,
    depth_inside,
    hooks_of,
    is_iterator,
    is_of_library,
    is_users,
    owners_of,
    values_in,
    variables_of,
)
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.tensors import local_part

#: containers whose contents are put back in place
_REFILLED = (dict, set, list, collections.deque, Slots)
#: optimizer attributes that a snapshot of the trainer already holds
_IN_SNAPSHOT = frozenset({"param_groups", "_state"})
#: maximum number of entries of a container, array or tensor that a guard inspects
_MAX_ENTRIES = 256
#: maximum number of containers, arrays and tensors that a guard inspects
_MAX_WATCHED = 50
#: `(function that returns the contents, contents)` of a container, array or tensor
Watched = tuple[Callable[[], Any], Any]


class Inventory:
    """Variables, and copies of everything that their values contain.

    Args:
        roots: modules, optimizers and schedules. Their attributes are kept, and what the code of
            their user-defined classes can reach. The values of parameters and buffers are left out.
        is_guard: keep only variables that are added, and only contents that can be compared in a
            few microseconds. Any other object is then compared by its identity.
        by_identity: equal values differ if they are not the same object.

    Attributes:
        iterators: names of iterators that cannot be copied and therefore cannot be put back.
        called: the user's functions that ran between `watch` and `stop`. Gradient hooks, for
            example, are found this way, because OneFlow has no list of them.
        functions: the user's functions that code can reach.
        watched: for a guard, the contents to compare before every step.
    """

    def __init__(
        self, roots: Iterable[Any] = (), is_guard: bool = False, by_identity: bool = False
    ):
        self.iterators: list[str] = []
        self.called: list[Any] = []
        self.watched: list[Watched] = []
        self.functions: set[Any] = set()
        self._is_guard, self._by_identity = is_guard, by_identity
        #: variables with their values; for an iterator of a library with a copy of it
        self._variables: list[tuple[Variable, Any]] = []
        #: id of an object → the object and a copy of its contents. Keeps the object alive, because
        #: the id of a freed one could be reused
        self._contents: dict[int, tuple[Any, Any]] = {}
        #: id → `(owner, scope, names)`: on restoring, other names are deleted from `scope`
        self._scopes: dict[int, tuple[Any, Any, frozenset[str]]] = {}
        #: codes and classes that are known, by id
        self._seen: dict[int, Any] = {}
        #: id of an object → smallest number of containers around it so far
        self._depths: dict[int, int] = {}
        for root in roots:
            self._add_root(root)

    # ------------------------------------------------------------------ uses

    def restore(self) -> None:
        """Put everything back. May be called several times."""
        for owner, scope, names in self._scopes.values():
            for name in scope.keys() - names:
                if owner is None:
                    del scope[name]
                elif not name.startswith("__") and not isinstance(scope[name], types.ModuleType):
                    _delete(owner, name)
        for variable, kept in self._variables:
            value = copy_of_iterator(kept)
            # some classes, such as enumerations, refuse even the value that they have
            if value is not kept or variable.read() is not kept:
                variable.assign(value)
        for value, kept in self._contents.values():
            _put_back(value, kept)

    def changed(self) -> list[Variable]:
        """Return the variables whose values differ from the kept ones, at any depth."""
        known: set[tuple[int, int]] = set()
        return [
            variable
            for variable, kept in self._variables
            if not self._is_same(variable.read(), kept, known)
        ]

    def watch(self) -> None:
        """Until `stop`, also keep what each of the user's functions can reach, before its first
        call.

        Does nothing while another profiler is active.
        """
        if sys.getprofile() is None:
            sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop watching. Costs nothing if this object is not watching."""
        if sys.getprofile() == self._note:
            sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in self._seen:
            self._seen[id(code)] = code
            if is_users(frame.f_globals.get("__name__", "")):
                found = [one for one in gc.get_referrers(code) if type(one) is types.FunctionType]
                self.called += found
                for one in found:
                    self.add_function(one)

    # ------------------------------------------------------------------ what is kept

    def _add_root(self, root: Any) -> None:
        """Keep the attributes of `root`, and everything that the methods of its user-defined
        classes can reach.
        """
        label, skip = type(root).__name__, _IN_SNAPSHOT
        if isinstance(root, nn.Module):
            skip = OF_MODULE
            for held in (root._modules, root._parameters, root._buffers):
                self._contents[id(held)] = (held, dict(held))  # not the values of tensors
            self._keep(hooks_of(root), label)
        attributes = vars(root)
        self._scopes[id(attributes)] = (None, attributes, skip.union(attributes))
        for name in sorted(attributes.keys() - skip):
            assign = partial(attributes.__setitem__, name)
            self.add(Variable(f"{label}.{name}", partial(attributes.get, name), assign, name, root))
        for cls in type(root).__mro__:
            if id(cls) in self._seen or not is_users(cls.__module__):
                continue
            self._seen[id(cls)] = cls
            self._keep_names(cls, vars(cls))
            for name, value in list(vars(cls).items()):
                if isinstance(value, types.FunctionType):
                    self.add_function(value)
                elif not (name.startswith("__") or callable(value) or hasattr(value, "__get__")):
                    read, assign = partial(vars(cls).get, name), partial(setattr, cls, name)
                    self.add(Variable(f"{cls.__name__}.{name}", read, assign, name, cls))

    def add_function(self, function: Any) -> None:
        """Keep the globals, closure and defaults of a user's function, and do the same for
        functions in them.
        """
        known = set(self.functions)
        for variable in variables_of([function], self.functions):
            value = variable.read()
            if not isinstance(value, type) and not hasattr(value, "__get__"):
                self.add(variable)
        for one in self.functions - known:
            for owner in owners_of(one):
                self._keep_names(owner, owner if isinstance(owner, dict) else vars(owner))
            code = one.__code__
            for kind, names in (
                ("__defaults__", code.co_varnames[: code.co_argcount]),
                ("__kwdefaults__", tuple(one.__kwdefaults__ or ())),
            ):
                read, assign = partial(getattr, one, kind), partial(setattr, one, kind)
                text = f"the defaults of {one.__qualname__}"
                self.add(Variable(text, read, assign, "|".join(names)))

    def add(self, variable: Variable) -> None:
        """Keep the value of a variable, and what it contains."""
        value = variable.read()
        if cannot_go_back(value):
            self.iterators.append(variable.name)
        self._variables.append((variable, copy_of_iterator(value)))
        self._keep(value, variable.name)

    def _keep_names(self, owner: Any, scope: Mapping[str, Any]) -> None:
        """Delete on restoring what code has added to `scope`, the attributes of a class or function
        (`owner`), or the names of a module (`owner` is the scope itself).

        Modules that were imported and names with two underscores stay.
        """
        self._scopes.setdefault(id(owner), (owner, scope, frozenset(scope)))

    def _keep(self, value: Any, name: str, depth: int = 0, is_own: bool = True) -> None:
        """Keep the contents of `value`, which is inside `depth` containers and objects.

        `is_own`: false if one of them is an object of a library, whose contents are less likely to
        matter.
        """
        if isinstance(value, (*SIMPLE, *NOT_COMPARED)):
            return
        if isinstance(value, types.FunctionType):
            if not self._is_guard:
                self.add_function(value)
            return
        held = container_in(value)
        if depth > MAX_DEPTH:
            is_changing = isinstance(held, _REFILLED) or isinstance(value, (*_NUMBERS, *RANDOM))
            if is_own and (held or is_changing) and not self._is_guard:
                _warn_of_depth(name)
            return
        known_depth = self._depths.get(id(value), MAX_DEPTH + 1)
        if known_depth <= depth:
            return
        if known_depth > MAX_DEPTH:
            if not self._is_inspected(value, held):
                return
            kept = _contents_of(value)
            self._contents[id(value)] = (value, kept)
            if self._is_guard and not isinstance(value, tuple | frozenset):
                self._watch(value, held, kept)
        self._depths[id(value)] = depth
        is_own = is_own and not is_of_library(value)
        for one in values_in(held):
            is_fixed = not isinstance(held, _REFILLED) and container_in(one) is None
            if is_own and is_iterator(one) and (is_fixed or cannot_go_back(one)):
                self.iterators.append(name)
            self._keep(one, name, depth_inside(value, depth), is_own)
        call = type(value).__call__ if callable(value) else None
        if isinstance(call, types.FunctionType) and not self._is_guard:
            self.add_function(call)

    def _is_inspected(self, value: Any, held: Any) -> bool:
        """Return whether the contents of `value` are kept.

        A guard inspects objects of the user's classes and of settings libraries. It inspects
        neither large values nor a tensor if another device or rank has a part of it.
        """
        if isinstance(value, flow.Tensor):
            is_elsewhere = value.is_lazy or self._is_guard and (value.is_global or value.is_cuda)
            size = _MAX_ENTRIES + 1 if is_elsewhere else value.numel()
            return not is_elsewhere if not self._is_guard else self._has_room(size)
        if isinstance(value, np.ndarray | np.generic):
            return not self._is_guard or self._has_room(value.size)
        if type(value) in RANDOM:
            return not self._is_guard
        if held is None or not self._is_guard:
            return held is not None
        return not is_of_library(value) and (
            isinstance(value, tuple | frozenset) or self._has_room(len(held))
        )

    def _has_room(self, size: int) -> bool:
        return size <= _MAX_ENTRIES and len(self.watched) < _MAX_WATCHED

    def _watch(self, value: Any, held: Any, kept: Any) -> None:
        if isinstance(value, _NUMBERS):
            read = partial(_bytes_of, value)
            self.watched.append((read, read()))
        elif isinstance(held, _REFILLED):
            self.watched.append((held.copy, kept))
            # a list's True may become 1, which is equal
            if (self._by_identity or held is value) and isinstance(held, Mapping | list):
                ids = partial(_ids_in, held)
                self.watched.append((ids, ids()))
        elif isinstance(value, ContextVar):
            read = partial(value.get, None)
            self.watched.append((read, read()))

    # ------------------------------------------------------------------ comparison

    def _is_same(self, now: Any, kept: Any, known: set[tuple[int, int]]) -> bool:
        """Return whether a value equals the kept one, as it was then.

        `known`: ids of pairs that were compared, because objects may refer to each other.
        """
        if isinstance(kept, SIMPLE) or isinstance(now, SIMPLE):
            # not `==`: NaN equals NaN here, and 0.0 is not -0.0
            is_equal = type(now) is type(kept) and repr(now) == repr(kept)
            return now is kept if self._by_identity else is_equal
        if now is not kept:
            is_lazy = isinstance(now, flow.Tensor) and now.is_lazy
            if is_lazy or type(now) is not type(kept):
                return False
            # objects of a class without `__eq__` are never equal; a method is a new object at
            # each read
            is_plain = is_users(type(kept).__module__) and type(kept).__eq__ is object.__eq__
            is_itself = self._is_guard and not isinstance(kept, types.MethodType)
            if is_itself and (self._by_identity or is_plain):
                return False
            if isinstance(kept, types.FunctionType) and not self._is_guard:
                return now.__code__ is kept.__code__
        if cannot_go_back(kept):  # a generator, of a decorator for example
            return now is kept
        if is_iterator(kept) and not hasattr(kept, "__dict__"):
            return repr(now.__reduce__()[1:]) == repr(kept.__reduce__()[1:])
        if id(kept) not in self._contents:
            return now is kept or not self._is_guard
        if (id(now), id(kept)) in known:
            return True
        known.add((id(now), id(kept)))
        before = self._contents[id(kept)][1]
        if isinstance(kept, _NUMBERS):
            is_alike = now.shape == before.shape and now.dtype == before.dtype
            return is_alike and _bytes_of(now) == _bytes_of(before)
        contents = _contents_of(now)
        if type(kept) in RANDOM or isinstance(before, set | frozenset):
            return bool(repr(contents) == repr(before) or contents == before)
        if isinstance(before, dict) and [*before] != [*contents]:
            return False
        pairs = [*zip(values_in(contents), values_in(before))]
        return len(contents) == len(before) and all(
            self._is_same(one, other, known) for one, other in pairs
        )


_NUMBERS = (flow.Tensor, np.ndarray, np.generic)


def _ids_in(container: Mapping[Any, Any] | list[Any]) -> list[int]:
    return [*map(id, values_in(container))]


def _bytes_of(numbers: Any) -> bytes:
    array = local_part(numbers).numpy() if isinstance(numbers, flow.Tensor) else numbers
    return bytes(array.tobytes())


def _delete(owner: Any, name: str) -> None:
    if isinstance(owner, dict):
        del owner[name]
    else:
        delattr(owner, name)


def _warn_of_depth(name: str) -> None:
    warn_once(
        logger,
        f"depth of {name}",
        f"{name} holds values inside more than {MAX_DEPTH} containers and objects. If an update "
        "changes them, the updates that are rehearsed before training do not undo it, and a "
        "compiled step does not see it. Nest the values less deeply, or keep them in buffers "
        "(`register_buffer`).",
    )


def _contents_of(value: Any) -> Any:
    """Return a copy of what `value` contains, but not of the contents of what it contains."""
    if type(value) in RANDOM:
        return type(value).__getstate__(value)
    if isinstance(value, flow.Tensor):
        return copy_of_values(value)
    if isinstance(value, np.ndarray | np.generic):
        return np.copy(value)
    held = container_in(value)
    return _copied(held) if isinstance(held, _REFILLED) else held


def _put_back(value: Any, kept: Any) -> None:
    held = container_in(value)
    if type(value) in RANDOM:
        type(value).__setstate__(value, kept)
    elif isinstance(value, flow.Tensor):
        if _bytes_of(value) != _bytes_of(kept):
            with flow.no_grad():
                value.data.copy_(kept)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            np.copyto(value, kept)
    elif isinstance(value, ContextVar):
        value.set(*kept)
    elif isinstance(held, _REFILLED):
        _fill(held, _copied(kept))  # a copy, because they may be put back again


def copy_of_values(tensor: flow.Tensor) -> flow.Tensor:
    """Return a copy of a tensor without its history."""
    return tensor.detach().clone()


def _copied(container: Any) -> Any:
    """Return a copy of a container, in which iterators keep their positions."""
    copied = copy.copy(container)
    if isinstance(container, Mapping):
        copied.update(
            {key: copy_of_iterator(one) for key, one in container.items() if is_iterator(one)}
        )
    elif any(map(is_iterator, container)):
        _fill(copied, map(copy_of_iterator, container))
    return copied


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    fill = container.extend if isinstance(container, list | collections.deque) else container.update
    fill(contents)
