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

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.buffers import buffers_of, keep_buffers
from libai.engine.compiled.tracing import Reads
from libai.forward.inventory import Inventory
from libai.forward.python_state import (
    Variable,
    compares_identity,
    functions_of,
    hooks_of,
    is_users,
    names_in,
    variables_of,
)
from libai.parallel import named_tensors
from libai.patches.local_operations import hooks_of_parameter
from libai.patches.writes import count_new_data, count_writes, watch_attributes
from libai.utils.errors import UserError
from libai.utils.tensors import local_part

#: a value that changes again within this many iterations is not worth another compilation
STEADY_ITERS = 50
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
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
        self._by_identity = compares_identity(self._functions)
        if any("param_groups" in names_in(function) for function in self._functions):
            self._inputs = ()  # forward reads the settings as constants
        self._buffers = buffers_of(model)
        self._changed_at: dict[str, int] = {} if before is None else before._changed_at
        self._differs: list[str] = []
        #: true if none of the values in the latest change had changed before
        self._is_first = True
        self._compiled = self._last_seen = self._look()
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
        parts = self._parts([])
        changed = self._last_seen.differing(parts)
        if changed:
            self._is_first = not any(name in self._changed_at for name in changed)
        self._changed_at.update(dict.fromkeys(changed, iteration))
        self._differs = self._compiled.differing(parts)
        self._last_seen = self._look()

    def _refuse_gradients(self, iteration: int) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and local_part(parameter.grad).numpy().any():
                raise UserError(
                    f"{name} has a gradient before iteration {iteration + 1}. A hook has computed "
                    "this gradient, but a compiled step would ignore it. Clear the gradient in "
                    "the hook (optimizer.zero_grad()), add the hook's loss in forward, or train "
                    "with graph.enabled=false."
                )

    def _look(self) -> _Guarded:
        """Keep what is guarded, and collect the values to compare before every step."""
        values = Inventory(is_guard=True, by_identity=self._by_identity)
        #: values without a setter
        self._unseen: list[tuple[Callable[[], Any], Any]] = []
        #: `(mapping, key, value)` of attributes and methods
        self._entries: list[tuple[Mapping[str, Any], str, Any]] = []
        for path, module, name in self._attributes:
            read = partial(getattr, module, name, None)
            if name == "__dict__":  # the names in it: `reads` also has each attribute
                read = partial(tuple, vars(module))
            values.add(Variable(path, read))
            if name == "__dict__":
                continue
            if name not in vars(module):
                of_class = partial(getattr, type(module), name, None)
                if not callable(read()):
                    self._unseen.append((of_class, of_class()))
            elif is_users(type(module).__module__):
                self._entries.append((vars(module), name, read()))
        named = frozenset().union(*map(names_in, self._functions))
        for cls in {cls: None for one in self._model.modules() for cls in type(one).__mro__}:
            for name in named & vars(cls).keys() if is_users(cls.__module__) else ():
                value = vars(cls)[name]
                if not (name.startswith("__") or callable(value) or hasattr(value, "__get__")):
                    self._entries.append((vars(cls), name, value))
                    read = partial(vars(cls).get, name)
                    values.add(Variable(f"{cls.__qualname__}.{name}", read))
        variables = [*self._variables]
        for function in self._functions:
            name = f"the code or defaults of {function.__qualname__}"
            variables += [Variable(name, partial(getattr, function, part)) for part in _PARTS]
        for variable in variables:
            values.add(variable)
            self._unseen.append((variable.read, variable.read()))
        for name, tensor in named_tensors(self._model):
            for hook in hooks_of_parameter(tensor):
                values.add(Variable(name, partial(_itself, hook)))
        held: list[Any] = []
        parts = self._parts(held)
        #: contents to compare, as in `Inventory.watched`
        self._watched = values.watched
        self._watch_sizes()
        self._columns = [*zip(*self._entries)] or ((), (), ())
        return _Guarded(values, parts, held)

    def _parts(self, held: list[Any]) -> dict[str, Any]:
        """Return the identities of modules, methods and tensors, and the settings of the optimizer.

        `held` receives objects that must stay alive, because the id of a freed one could be reused.
        """
        parts: dict[str, Any] = {}
        for path, module in self._model.named_modules():
            own, tensors = vars(module), {**module._modules, **module._parameters}
            tensors.update(module._buffers)
            shadows = [own[one] for one in tensors if one in own]
            found = [module, type(module), own.get("forward"), *hooks_of(module), *shadows]
            name = f"the module {path or type(module).__name__} (itself or its forward hooks)"
            parts[name] = [*map(id, found)]
            parts[f"the tensors and modules of {path}"] = [*zip(tensors, map(id, tensors.values()))]
            held += found
        for cls, name, value in _methods_of(self._model):
            parts[f"{cls.__qualname__}.{name}"] = id(value)
        for name, tensor in named_tensors(self._model):
            hooks = [*hooks_of_parameter(tensor)]
            held += hooks
            parts[name] = (id(tensor), count_new_data(tensor), [*map(id, hooks)])
            parts[f"{name}.requires_grad"] = tensor.requires_grad
        for index, group in enumerate(self._optimizer.param_groups):
            for key, value in group._options.items():
                if key not in self._inputs:
                    parts[f'param_groups[{index}]["{key}"]'] = repr(value)
            parts[f"the parameters of param_groups[{index}]"] = [*map(id, group._parameters)]
        return parts

    def _watch_sizes(self) -> None:
        """Also compare before every step which methods, attributes and parameters there are."""
        self._entries += [(vars(cls), *method) for cls, *method in _methods_of(self._model)]
        sizes = partial(_sizes, [vars(module) for module in self._model.modules()])
        self._watched.append((sizes, sizes()))
        groups = self._optimizer.param_groups
        copies = [groups.copy, *(group._parameters.copy for group in groups)]
        if "lr" not in self._inputs:  # writes to it are not counted
            copies += [group._options.copy for group in groups]
        self._watched += [(read, read()) for read in copies]


@dataclass(frozen=True)
class _Guarded:
    """Guarded values and identities at one time."""

    values: Inventory
    #: name → identity of a module, method or tensor, or a setting of the optimizer
    parts: dict[str, Any]
    held: list[Any]

    def differing(self, parts: dict[str, Any]) -> list[str]:
        """Return the names of what differs now. `parts`: the current `parts`."""
        before = self.parts
        names = [name for name in {**before, **parts} if before.get(name) != parts.get(name)]
        return names + [variable.name for variable in self.values.changed()]


def _methods_of(model: nn.Module) -> list[tuple[type, str, Any]]:
    """Return `(class, name, method)` for the user's classes of modules."""
    classes = {cls: None for module in model.modules() for cls in type(module).__mro__}
    return [
        (cls, name, value)
        for cls in classes
        if is_users(cls.__module__)
        for name, value in vars(cls).items()
        if callable(value) or hasattr(value, "__get__")
    ]


def _itself(value: Any) -> Any:
    return value


def _sizes(mappings: Sequence[Mapping[str, Any]]) -> list[int]:
    return [*map(len, mappings)]


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
