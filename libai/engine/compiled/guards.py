"""Guards of a compiled graph: what was compiled in as a constant, and what to do when it changes.

A graph is fixed to more than shapes: to the Python values that forward reads (attributes of modules, `self.training`
among them, globals, closures, attributes of classes, and what lists, dicts and objects hold), to the settings of
parameter groups but the rate, to which parameters there are and which need a gradient, and to the code itself.

Writes to attributes of modules and settings of groups are counted (`libai.patches.writes`); only after one are
the values compared with those compiled. The rest is compared before every step, in some microseconds.

Not guarded: what lists, dicts, arrays and tensors of more than 256 entries hold.

Attributes of modules come from the trace itself. Globals and closures are those of the functions that ran in it, which
a profile function sees. `Contents` looks into lists, dicts, sets, arrays and objects.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.python_state import PACKAGES, cell_value, hooks_of, is_users_frame
from libai.optim.state import like_parameter
from libai.parallel import named_tensors
from libai.patches.writes import INPUTS, count_new_data, count_writes, watch_attributes
from libai.utils.errors import UserError

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


#: a value that changes again within this many iterations is not worth another compilation
STEADY_ITERS = 50
#: attributes that are compared before every step, at 50 ns each, although writes to them are counted
_MOST_ATTRIBUTES = 50
Decision = Literal["compiled", "recompile", "eager"]


class Guards:
    """Compares what was compiled into a graph with what holds now.

    Args:
        model: the module of the graph.
        reads: the attributes that its forward read.
        optimizer: of a training graph; its settings are guarded, and which parameters need a gradient.
        inputs: settings of parameter groups that are not compiled in.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Reads,
        optimizer: flow.optim.Optimizer | None = None,
        inputs: Sequence[str] = INPUTS,
    ):
        self._model, self._optimizer, self._inputs = model, optimizer, inputs
        paths = {id(module): path for path, module in model.named_modules()}
        self._attributes = [
            (".".join(filter(None, (paths.get(id(module), type(module).__name__), name))), module, name)
            for module, name in reads.attributes
        ]
        watch_attributes(name for _, _, name in self._attributes)
        self._variables = list(reads.variables())
        self._cells = list(reads.cells())
        self._buffers = [
            (module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()
        ]
        self._compiled = self._last_seen = self._now()
        self._count = count_writes()
        self._changed_at: dict[str, int] = {}
        self._told: set[str] = set()
        self._differs: list[str] = []

    def decide(self, iteration: int) -> Decision:
        """Return how to run iteration `iteration`: as compiled, compiled again, or eagerly.

        `differences` describes what made a decision other than "compiled".
        """
        count = count_writes()
        if count != self._count or not self._inputs or self._has_unseen_change():  # writes to inputs are not counted
            self._count = count
            self._compare(iteration)
        elif not self._differs:
            return "compiled"
        if not self._differs:
            return "compiled"
        steady = all(iteration - self._changed_at[name] >= STEADY_ITERS for name in self._differs)
        return "recompile" if self._is_first or steady else "eager"

    def _has_unseen_change(self) -> bool:
        """Return whether something has changed whose writes are not counted."""
        for owner, key, value in self._known_variables:
            if owner.get(key) is not value:
                return True
        for cell, value in self._known_cells:
            if cell_value(cell) is not value:
                return True
        return self._contents.differ()

    def _compare(self, iteration: int) -> None:
        self._keep_buffers()
        now = self._now()
        changed = _differing(self._last_seen, now)
        if changed:
            self._is_first = not any(name in self._changed_at for name in changed)
        self._changed_at.update(dict.fromkeys(changed, iteration))
        self._differs = _differing(self._compiled, now)
        self._last_seen = now

    #: whether none of the values of the last change had changed before
    _is_first = True

    def adopt_history(self, old: Guards) -> None:
        """Remember the changes that the guards of the graph before this one have seen."""
        self._changed_at = old._changed_at
        self._told = old._told

    def is_new(self) -> bool:
        """Return whether this is the first call for what differs now, so that it is told once."""
        name = self._differs[0]
        if name in self._told:
            return False
        self._told.add(name)
        return True

    def differences(self) -> str:
        """Describe what differs from the compiled values: `scale (1.0, now 0.9)`."""
        shown = [
            f"{name} ({self._compiled.get(name)!r}, now {self._last_seen.get(name)!r})" for name in self._differs[:3]
        ]
        more = len(self._differs) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    def _keep_buffers(self) -> None:
        """Give a buffer that was replaced by another tensor its value instead: the graph knows the old one."""
        for module, name, buffer in self._buffers:
            now = module._buffers.get(name)
            if now is buffer or now is None or buffer is None or tuple(now.shape) != tuple(buffer.shape):
                continue
            with flow.no_grad():
                buffer.copy_(like_parameter(now, buffer))
            module._buffers[name] = buffer

    def _now(self) -> dict[str, Any]:
        self._contents = contents = Contents()
        for path, module, name in self._attributes:
            contents.add(path, getattr(module, name, None))
        self._known_variables = [(owner, key, owner.get(key)) for _, owner, key in self._variables]
        for description, owner, key in self._variables:
            contents.add(description, owner.get(key))
        self._known_variables += self._attributes_of_user()
        self._known_cells = [(cell, cell_value(cell)) for _, cell in self._cells]
        for description, cell in self._cells:
            contents.add(description, cell_value(cell))
        for path, module in self._model.named_modules():
            self._add_code(path, module)
        values = contents.values
        for name, tensor in named_tensors(self._model):
            values[name] = Identity(tensor)
            values[f"the data of {name}"] = count_new_data(tensor)
            if self._optimizer is not None:
                values[f"{name}.requires_grad"] = tensor.requires_grad
        if self._optimizer is not None:
            self._add_groups(self._optimizer.param_groups)
        return values

    def _attributes_of_user(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes that may be written past `__setattr__`; some, for `training` is read of every module."""
        chosen = [(vars(module), name) for _, module, name in self._attributes if is_users(type(module).__module__)]
        return [(owner, name, owner.get(name)) for owner, name in chosen[:_MOST_ATTRIBUTES]]

    def _add_code(self, path: str, module: nn.Module) -> None:
        """Add what a call of `module` runs: its class, a forward of its own, its hooks."""
        contents, label = self._contents, path or type(module).__name__
        for cls in type(module).__mro__:
            contents.add(cls.__name__, cls)
        contents.values[f"the class of {label}"] = Identity(type(module))
        for name, value in vars(module).items():  # it may hide a method
            if callable(value):
                contents.values[f"{label}.{name}"] = Identity(value)
        hooks = tuple(Identity(hook) for hook in hooks_of(module))
        contents.values[f"the forward hooks of {label}"] = hooks

    def _add_groups(self, groups: list[Any]) -> None:
        values = self._contents.values
        for index, group in enumerate(groups):
            for key, value in group._options.items():
                if key not in self._inputs and is_plain(value):
                    values[f'param_groups[{index}]["{key}"]'] = value
            values[f"the parameters of param_groups[{index}]"] = tuple(map(Identity, group.parameters))
        for live in (groups, *(group._parameters for group in groups)):
            self._contents.watched.append((live, list(live)))


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*before, *now])
    return [name for name in names if name not in before or name not in now or not _same(before[name], now[name])]


def _same(one: Any, other: Any) -> bool:
    # 1 and True are equal, and not the same to a forward; a NaN is not equal to itself
    return one is other or (type(one) is type(other) and one == other)


def refuse_own_update(optimizer: flow.optim.Optimizer) -> None:
    """Raise `UserError` for an optimizer whose class replaces `step` or `zero_grad`.

    A compiled step makes OneFlow's own update and calls neither.
    """
    for part in getattr(optimizer, "optimizers", {"": optimizer}).values():
        for name in ("step", "zero_grad"):
            owner = next(cls for cls in type(part).__mro__ if name in vars(cls))
            on_instance = vars(part).get(name)
            # OneFlow itself wraps `step` of every instance
            is_own = owner.__module__.startswith(("oneflow.", "libai."))
            is_wrapped = getattr(on_instance, "__module__", "oneflow.optim.optimizer") == "oneflow.optim.optimizer"
            if is_own and is_wrapped:
                continue
            raise UserError(
                f"{type(part).__name__}.{name} is not OneFlow's own, and graph mode cannot honour it: a compiled step "
                f"makes the update itself and never calls {name}(). Do the same in a hook's after_step, or train with "
                "graph.enabled=false."
            )
