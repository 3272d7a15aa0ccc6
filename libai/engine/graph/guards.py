"""Guards of a compiled graph: what was compiled in as a constant, and what to do when it changes.

A graph is fixed to more than shapes: to the plain Python attributes of modules that forward reads (`self.training`
among them), to the settings of parameter groups but the rate, and to which parameters need a gradient. Writes to any of
these are counted (`libai.oneflow_fixes.writes`); only after one are the values compared with those compiled.

Not guarded, because no write to them is seen: attributes of classes, closures, globals, and the insides of lists, dicts
and other objects that a module holds. A schedule of such a number belongs in a buffer, which is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import oneflow as flow
from oneflow import nn

from libai.oneflow_fixes.writes import INPUTS, count_writes
from libai.utils.errors import UserError

#: a value that changes again within this many iterations is not worth another compilation
STEADY_ITERS = 50
_PLAIN = (bool, int, float, str, type(None))
Decision = Literal["compiled", "recompile", "eager"]


def is_plain(value: Any) -> bool:
    """Return whether `value` is a number, a truth value, a text, None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


class Reads:
    """The plain attributes of modules that a forward read while it was traced."""

    def __init__(self) -> None:
        #: (module, attribute); a list keeps the modules alive, whose ids are the keys of `_known`
        self.attributes: list[tuple[nn.Module, str]] = []
        self._known: set[tuple[int, str]] = set()

    def add(self, module: nn.Module, name: str, value: Any) -> None:
        """Remember that `module.name` was read, if its value is plain."""
        if (id(module), name) not in self._known and is_plain(value):
            self._known.add((id(module), name))
            self.attributes.append((module, name))


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
        if count != self._count or not self._inputs:  # writes to inputs are not counted
            self._count = count
            self._compare(iteration)
        elif not self._differs:
            return "compiled"
        if not self._differs:
            return "compiled"
        steady = all(iteration - self._changed_at[name] >= STEADY_ITERS for name in self._differs)
        return "recompile" if self._is_first or steady else "eager"

    def _compare(self, iteration: int) -> None:
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

    def _now(self) -> dict[str, Any]:
        values = {path: getattr(module, name, None) for path, module, name in self._attributes}
        if self._optimizer is None:
            return values
        for name, parameter in self._model.named_parameters():
            values[f"{name}.requires_grad"] = parameter.requires_grad
        for index, group in enumerate(self._optimizer.param_groups):
            for key, value in group._options.items():
                if key not in self._inputs and is_plain(value):
                    values[f'param_groups[{index}]["{key}"]'] = value
            values[f"the parameters of param_groups[{index}]"] = tuple(id(one) for one in group.parameters)
        return values


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
