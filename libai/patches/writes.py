"""Count writes to everything a compiled graph depends on: module attributes, settings of parameter
groups, and `requires_grad` of tensors.

Comparing all of them before every compiled step would take longer than a step of a small model, but
reading a counter is almost free. A changed counter only means that something may have changed;
`libai.engine.compiled.guards` then compares. Writes that bypass `__setattr__`
(`module.__dict__["x"] = 1`), writes to class attributes, and changes inside lists and dicts are not
counted; the guards compare those before every step.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.optim.optimizer import Optimizer, ParamGroup

from libai.patches.wrapping import repair, repair_setter, repaired

#: group settings that are inputs of a compiled step, or are used only by schedules and eager
#: updates
INPUTS = ("lr", "initial_lr", "bias_correction1", "bias_correction2")

#: functions that write to what a graph depends on
_WRITERS: dict[type, tuple[str, ...]] = {
    nn.Module: (
        "__delattr__",
        "add_module",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
    ),
    nn.ModuleDict: ("__delitem__", "clear"),
    nn.ModuleList: ("__delitem__",),
    Optimizer: ("add_param_group",),
    ParamGroup: ("setdefault",),
    flow.Tensor: ("register_hook", "requires_grad_", "backward"),
}
_HELD = ("_modules", "_parameters", "_buffers")
_PLAIN = (bool, int, float, str, type(None))
_count = 0
#: module attributes with plain values that are compared; writes of plain values to other attributes
#: are not counted
_names: set[str] = set()
#: id of a tensor → number of times its `data` was set
_new_data: collections.Counter[int] = collections.Counter()


def count_writes() -> int:
    """Return the number of writes so far. The first call starts counting, for the whole process."""
    _begin()
    return _count


def watch_attributes(names: Iterable[str]) -> None:
    """Also count writes of plain values (bool, int, float, str, None) to attributes with these
    names.
    """
    _names.update(names)


def count_new_data(tensor: flow.Tensor) -> int:
    """Return how often `tensor.data` was set since counting started."""
    return _new_data[id(tensor)]


@functools.cache
def _begin() -> None:
    for owner, names in _WRITERS.items():
        repair(owner, dict.fromkeys(names, _counted))
    set_item = ParamGroup.__setitem__
    set_attribute = nn.Module.__setattr__

    def set_attribute_of_module(self: nn.Module, name: str, value: Any) -> None:
        set_attribute(self, name, value)
        # None takes away a tensor or module. A constructor may not have the dicts of them yet
        is_held = value is None and any(name in vars(self).get(kind, ()) for kind in _HELD)
        if is_held or not isinstance(value, _PLAIN) or name in _names:
            note_write()

    nn.Module.__setattr__ = set_attribute_of_module

    def set_setting(self: ParamGroup, key: str, value: Any) -> None:
        set_item(self, key, value)
        if key not in INPUTS:  # schedules write the learning rate in every iteration
            note_write()

    ParamGroup.__setitem__ = set_setting
    # code that gets the dict of settings may write to it
    ParamGroup.options = property(repaired(_counted, ParamGroup.options.fget))
    repair_setter(flow.Tensor, "data", _set_data)
    repair_setter(flow.Tensor, "requires_grad", _counted)


def _set_data(
    set_data: Callable[[flow.Tensor, Any], None], tensor: flow.Tensor, value: Any
) -> None:
    set_data(tensor, value)
    _new_data[id(tensor)] += 1
    note_write()


def note_write() -> None:
    """Count a write that no replaced function sees."""
    global _count
    _count += 1


def _counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    note_write()
    return result
