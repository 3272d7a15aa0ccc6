"""The Python values that a forward reads while it is traced, which a compiled step then holds as constants.

Attributes of modules come from the trace itself. Globals and closures are those of the functions that ran in it, which
a profile function sees. `Contents` looks into lists, dicts, sets, arrays and objects, so that a change inside of them
is noticed too.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.python_state import PACKAGES, hooks_of, is_users_frame

#: entries of containers that are compared before every step, at 2 ns each; larger ones are not looked into
MOST_ENTRIES = 1000
_MOST_IN_ONE = 256
_PLAIN = (bool, int, float, str, bytes, type(None))
#: packages whose objects hold settings of the user
_SETTINGS = ("types", "argparse", "omegaconf")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class Identity:
    """A value that is compared by what it is, not by what it holds."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def is_plain(value: Any) -> bool:
    """Return whether `value` is a number, a truth value, a text, None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


class Reads:
    """The Python values that a forward has read while it was traced.

    Attributes:
        attributes: `(module, name)`; the list keeps the modules alive, whose ids are known here.
    """

    def __init__(self) -> None:
        self.attributes: list[tuple[nn.Module, str]] = []
        self._known: set[tuple[int, str]] = set()
        #: the code that ran → its globals, None where the code is not the user's
        self._ran: dict[types.CodeType, dict[str, Any] | None] = {}

    def add(self, module: nn.Module, name: str, value: Any) -> None:
        """Remember that `module.name` was read, if it is Python's: no method, tensor or module that is traced."""
        key = (id(module), name)
        if key not in self._known and (name in vars(module) or is_plain(value)):
            self._known.add(key)
            self.attributes.append((module, name))

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Inside, the functions of the user that the forward of `model` runs are remembered."""
        if not any(hooks_of(module) or is_users(type(module).__module__) for module in model.modules()):
            yield  # a profile function makes a trace a quarter slower
            return
        before = sys.getprofile()
        sys.setprofile(self._follow)
        try:
            yield
        finally:
            if isinstance(before, cProfile.Profile):  # `train.profile`, which is not callable
                before.enable()
            else:
                sys.setprofile(before)

    def _follow(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._ran:
            self._ran[code] = frame.f_globals if is_users_frame(frame) else None
        if self._ran[code] is None or not code.co_argcount:
            return
        # a property runs with the module itself, where a traced method has a proxy of it that reports its reads
        owner = frame.f_locals.get(code.co_varnames[0])
        if issubclass(type(owner), nn.Module):
            for name in code.co_names:
                if name in vars(owner):
                    self.add(owner, name, None)

    def variables(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """`(description, dict, key)` of the globals that the functions name, and of the names of user's modules."""
        seen = set()
        for code, variables in self._ran.items():
            if variables is None:
                continue
            for name in code.co_names:
                value = variables.get(name)
                places = [(variables, name)] if name in variables else []
                if isinstance(value, types.ModuleType) and is_users(value.__name__):
                    places += [(vars(value), inner) for inner in code.co_names if inner in vars(value)]
                for owner, key in places:
                    if (id(owner), key) not in seen:
                        seen.add((id(owner), key))
                        yield f"the global {key}", owner, key

    def cells(self) -> Iterator[tuple[str, types.CellType]]:
        """`(description, cell)` of the variables that the functions have in a closure."""
        for code, variables in self._ran.items():
            if variables is None or not code.co_freevars:
                continue
            functions = [one for one in gc.get_referrers(code) if isinstance(one, types.FunctionType)]
            for function in functions:
                for name, cell in zip(code.co_freevars, function.__closure__ or ()):
                    if name != "__class__":
                        yield f"the variable {name} around {code.co_name}", cell


class Contents:
    """The Python values behind some names, flattened: `weights['a']`, `config.loss.scale`.

    Attributes:
        values: name → plain value, or `Identity`.
        watched: `(container, shallow copy)` of what was looked into; equal as long as nothing has changed.
        arrays: `(function that returns an array, its bytes)`, likewise.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.watched: list[tuple[Any, Any]] = []
        self.arrays: list[tuple[Callable[[], np.ndarray], bytes]] = []
        self._seen: set[int] = set()
        self._num_entries = 0

    def differ(self) -> bool:
        """Return whether a container or array holds something else than when it was looked into."""
        try:
            for container, copied in self.watched:
                if container != copied:
                    return True
        except Exception:  # values that cannot be compared, such as tensors, are not those of before
            return True
        return any(read().tobytes() != copied for read, copied in self.arrays)

    def add(self, name: str, value: Any) -> None:
        """Take in `value`, and what it holds."""
        if is_plain(value):
            self.values[name] = value
        elif isinstance(value, np.generic):
            self.values[name] = value.item()
        elif id(value) in self._seen:
            return
        elif isinstance(value, np.ndarray) and value.size <= _MOST_IN_ONE and value.dtype != object:
            self._add_array(name, value, value.view)
        elif isinstance(value, flow.Tensor) and _is_constant(value):
            self._add_array(name, value, value.numpy)
        else:
            self._add_container(name, value)

    def _add_array(self, name: str, value: Any, read: Callable[[], np.ndarray]) -> None:
        self._seen.add(id(value))
        array = read()
        self.arrays.append((read, array.tobytes()))
        self.values[name] = (array.shape, str(array.dtype), array.tobytes())

    def _add_container(self, name: str, value: Any) -> None:
        container = _container_of(value)
        if container is None or len(container) > min(_MOST_IN_ONE, MOST_ENTRIES - self._num_entries):
            self.values[name] = Identity(value)
            return
        self._seen.add(id(value))
        self._num_entries += len(container)
        if not isinstance(value, tuple):
            copied = dict(container) if isinstance(container, types.MappingProxyType) else container.copy()
            self.watched.append((container, copied))
        if isinstance(container, set | frozenset):
            self.values[name] = frozenset(container)
        elif isinstance(container, list | tuple | deque):
            self.values[f"len({name})"] = len(container)
            for index, item in enumerate(container):
                self.add(f"{name}[{index}]", item)
        else:
            is_object = not isinstance(value, dict)
            for key, item in list(container.items()):
                self.add(f"{name}.{key}" if is_object else f"{name}[{key!r}]", item)
        if _is_object(value):
            self.add(type(value).__name__, type(value))


def _container_of(value: Any) -> Any:
    """Return what of `value` holds other values, live; None where it is not looked into."""
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, type):
        return vars(value) if is_users(value.__module__) else None
    return vars(value) if _is_object(value) else None


def _is_constant(tensor: flow.Tensor) -> bool:
    """Return whether `tensor`, which a trace has read as it is, can be compared quickly."""
    is_traced = tensor.is_lazy or tensor.is_global or tensor.requires_grad
    return not is_traced and not tensor.is_cuda and tensor.numel() <= _MOST_IN_ONE


def _is_object(value: Any) -> bool:
    """Return whether `value` is an instance of a class of the user, or of a library that holds settings."""
    if isinstance(value, nn.Module | flow.Tensor | type | types.FunctionType | types.ModuleType):
        return False
    module = type(value).__module__
    is_known = module.split(".")[0] in _SETTINGS or is_users(module)
    return is_known and isinstance(getattr(value, "__dict__", None), dict)


def is_users(module: str) -> bool:
    """Return whether the module of this name is neither Python's, OneFlow's, libai's nor an installed package's."""
    top = module.split(".")[0]
    if top in PACKAGES or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not file.startswith(_INSTALLED)
