"""Guards of a compiled graph: what was compiled in as a constant, and what to do when it changes.

A graph is fixed to more than shapes: to the Python values that forward reads (attributes of modules, `self.training`
among them, globals, closures, attributes of classes, and what lists, dicts and objects hold), to the settings of
parameter groups but the rate, to which parameters there are and which need a gradient, and to the code itself.

Writes to attributes of modules and settings of groups are counted (`libai.patches.writes`); only after one are
the values compared with those compiled. The rest is compared before every step, in some microseconds.

Not guarded: what lists, dicts, arrays and tensors of more than 256 entries hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.reads import Contents, Identity, Reads, is_plain, is_users
from libai.forward.python_state import cell_value, hooks_of
from libai.optim.state import like_parameter
from libai.parallel import named_tensors
from libai.patches.writes import INPUTS, count_new_data, count_writes, watch_attributes
from libai.utils.errors import UserError

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
