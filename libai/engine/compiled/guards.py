"""Guards of a compiled graph: detect that a compiled-in constant has changed, and decide what to
do.

A graph depends on more than shapes. It is compiled for the Python values that forward reads:
attributes of modules (`self.training` is one), globals, closures, and the contents of lists, dicts
and objects. It is also compiled for the settings of parameter groups except the learning rate, for
the set of parameters, and for which of them need a gradient.

Writes to attributes of modules and to settings of groups are counted (`libai.patches.writes`). The
values are compared with the compiled ones only after such a write. Values without a setter are
compared before every step, which takes a few microseconds.

Attributes that forward reads come from the trace. The globals and closures are those that the
user's code names.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.buffers import buffers_of, keep_buffers
from libai.engine.compiled.tracing import Reads
from libai.forward.python_state import (
    Watched,
    compares_identity,
    fingerprint,
    functions_of,
    hooks_of,
    is_users,
    variables_of,
)
from libai.parallel import named_tensors
from libai.patches.local_operations import hooks_of_parameter
from libai.patches.writes import count_new_data, count_writes, watch_attributes
from libai.utils.errors import UserError
from libai.utils.tensors import local_part

#: a value that changes again within this many iterations is not worth another compilation
STEADY_ITERS = 50
_PARTS_OF_FUNCTION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
Decision = Literal["compiled", "recompile", "eager"]


class Guards:
    """Compares the values that were compiled into a graph with the current ones.

    Args: model: the module of the graph. reads: the attributes that its forward read. optimizer:
        the optimizer of the graph. Its settings and `requires_grad` of parameters are guarded.
        inputs: settings of parameter groups that are not compiled in. before: the guards of the
        previous graph. Their record of changes is kept.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Reads,
        optimizer: flow.optim.Optimizer,
        inputs: Sequence[str],
        before: Guards | None,
    ):
        self._model, self._optimizer, self._inputs = model, optimizer, inputs
        paths = {module: path for path, module in model.named_modules()}
        self._attributes = []
        for module, name in dict.fromkeys(reads):
            path = paths.get(module, type(module).__name__)
            self._attributes.append((f"{path}.{name}" if path else name, module, name))
        watch_attributes(name for _, _, name in self._attributes)
        self._functions: set[Any] = set()
        self._variables = list(variables_of(functions_of(model), self._functions))
        self._fingerprint = functools.partial(
            fingerprint, by_identity=compares_identity(self._functions)
        )
        self._buffers = buffers_of(model)
        self._changed_at: dict[str, int] = {} if before is None else before._changed_at
        self._differs: list[str] = []
        #: true if none of the values in the latest change had changed before
        self._is_first = True
        self._compiled = self._last_seen = self._now()
        self._compiled_held = self._held
        self._count = count_writes()

    def decide(self, iteration: int) -> Decision:
        """Return how to run iteration `iteration`: as compiled, compiled again, or eagerly.

        `differences` names the reason for a decision other than "compiled".
        """
        count = count_writes()
        if count != self._count or self._has_unseen_change():
            self._count = count
            self._compare(iteration)
        if not self._differs:
            return "compiled"
        is_steady = all(
            iteration - self._changed_at[name] >= STEADY_ITERS for name in self._differs
        )
        return "recompile" if self._is_first or is_steady else "eager"

    def differences(self) -> str:
        """Return the names of the values that differ from the compiled ones."""
        more = len(self._differs) - 3
        return ", ".join(self._differs[:3]) + (f" and {more} more" if more > 0 else "")

    def _has_unseen_change(self) -> bool:
        """Return whether a value has changed without a counted write."""
        for read, value in self._unseen:
            if read() is not value:
                return True
        mappings, names, compiled = self._columns
        try:
            if any(map(operator.is_not, map(operator.getitem, mappings, names), compiled)):
                return True
            for read, contents in self._watched:
                if read() != contents:
                    return True
        except Exception:  # values that cannot be compared, such as tensors, count as changed
            return True
        return False

    def _compare(self, iteration: int) -> None:
        self._refuse_gradients(iteration)
        keep_buffers(self._buffers)
        now = self._now()
        changed = _differing(self._last_seen, now)
        if changed:
            self._is_first = not any(name in self._changed_at for name in changed)
        self._changed_at.update(dict.fromkeys(changed, iteration))
        self._differs = _differing(self._compiled, now)
        self._last_seen = now

    def _refuse_gradients(self, iteration: int) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and local_part(parameter.grad).numpy().any():
                raise UserError(
                    f"{name} has a gradient before iteration {iteration + 1}. A hook has computed "
                    "this gradient, but a compiled step would ignore it. Clear the gradient in "
                    "the hook (optimizer.zero_grad()), add the hook's loss in forward, or train "
                    "with graph.enabled=false."
                )

    def _now(self) -> dict[str, Any]:
        """Return the fingerprints of all guarded values, and collect the values to compare before
        every step.
        """
        self._watched: Watched = []
        self._unseen: list[tuple[Callable[[], Any], Any]] = []
        self._held = []  # keeps the objects alive: the id of a freed one could be reused
        #: `(mapping, key, value)` of attributes and methods
        self._entries: list[tuple[Mapping[str, Any], str, Any]] = []
        values = {}
        for path, module, name in self._attributes:
            value = getattr(module, name, None)
            values[path] = self._fingerprint(value, self._watched)
            self._held.append(value)
            if name not in vars(module):
                of_class = functools.partial(getattr, type(module), name, None)
                if not callable(value):
                    self._unseen.append((of_class, of_class()))
            elif is_users(type(module).__module__):
                self._entries.append((vars(module), name, value))
        for description, read, _ in self._variables:
            value = read()
            values[description] = self._fingerprint(value, self._watched)
            self._unseen.append((read, value))
        for function in self._functions:
            name = f"the code or defaults of {function.__qualname__}"
            read = functools.partial(_PARTS_OF_FUNCTION, function)
            contents = fingerprint(read(), self._watched)
            values.setdefault(name, []).append((*map(id, read()), contents))
            self._held.append(read())
            self._watched.append((read, read()))
        self._add_modules(values)
        for name, tensor in named_tensors(self._model):
            hooks = fingerprint(tuple(hooks_of_parameter(tensor)), self._watched)
            values[name] = (id(tensor), count_new_data(tensor), hooks, "tensor")
            values[f"{name}.requires_grad"] = fingerprint(tensor.requires_grad)
        self._add_groups(self._optimizer.param_groups, values)
        self._columns = [*zip(*self._entries)] or ((), (), ())
        return values

    def _add_modules(self, values: dict[str, Any]) -> None:
        modules = [*self._model.modules()]
        for path, module in self._model.named_modules():
            name = f"the module {path or type(module).__name__} (itself or its forward hooks)"
            own = vars(module)
            held = {**module._modules, **module._parameters, **module._buffers}
            shadows = [own[one] for one in held if one in own]
            found = [module, type(module), own.get("forward"), *hooks_of(module), *shadows]
            values[name] = tuple(map(id, found))
            values[f"the tensors and modules of {path}"] = {
                one: id(value) for one, value in held.items()
            }
            self._held += found

        for kind in {
            cls for one in modules for cls in type(one).__mro__ if is_users(cls.__module__)
        }:
            for name, value in vars(kind).items():
                if callable(value) or hasattr(value, "__get__"):
                    values[f"{kind.__qualname__}.{name}"] = id(value)
                    self._held.append(value)
                    self._entries.append((vars(kind), name, value))
        sizes = functools.partial(_sizes, [vars(module) for module in modules])
        self._watched.append((sizes, sizes()))

    def _add_groups(self, groups: list[Any], values: dict[str, Any]) -> None:
        self._watched.append((groups.copy, groups.copy()))
        for index, group in enumerate(groups):
            for key, value in group._options.items():
                if key not in self._inputs:
                    values[f'param_groups[{index}]["{key}"]'] = fingerprint(value)
            parameters = group._parameters
            values[f"the parameters of param_groups[{index}]"] = [
                id(parameter) for parameter in parameters
            ]
            self._watched.append((parameters.copy, parameters.copy()))
            if "lr" not in self._inputs:  # writes to it are not counted
                self._watched.append((group._options.copy, group._options.copy()))


def _sizes(mappings: Sequence[Mapping[str, Any]]) -> list[int]:
    return [*map(len, mappings)]


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def refuse_own_update(optimizer: flow.optim.Optimizer) -> None:
    """Raise `UserError` if the class or the instance of an optimizer replaces `step` or
    `zero_grad`.

    A compiled step makes OneFlow's own update and calls neither of these methods.
    """
    for part in getattr(optimizer, "optimizers", {"": optimizer}).values():
        for name in ("step", "zero_grad"):
            of_class = getattr(type(part), name).__module__
            # OneFlow itself wraps `step` of every instance
            of_instance = getattr(vars(part).get(name), "__module__", of_class)
            if of_class.startswith(("oneflow.", "libai.")) and of_instance.startswith("oneflow."):
                continue
            raise UserError(
                f"{type(part).__name__}.{name} is not OneFlow's own, and graph mode cannot honour "
                f"it: a compiled step makes the update itself and never calls {name}(). Do its "
                "work in a hook's after_step, or train with graph.enabled=false."
            )
