"""A count of the writes to what a graph is compiled for: attributes of modules, settings of parameter groups, and which
tensors need a gradient.

Comparing all of them before every compiled step would cost more than the step of a small model; reading one number
costs nothing. The count says only that something may have changed, not what (`libai.engine.compiled.guards` compares).
Not counted: writes past `__setattr__` (`module.__dict__["x"] = 1`), to attributes of a class, and changes inside lists
and dicts.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.optim.optimizer import Optimizer, ParamGroup

#: settings of a parameter group that are inputs of a compiled step, or that only schedules and eager updates use
INPUTS = ("lr", "initial_lr", "bias_correction1", "bias_correction2")

_PLAIN = (bool, int, float, str, type(None))
_count = 0
#: attributes of modules whose plain values somebody compares; writes of plain values to others are not counted
_names: set[str] = set()
#: id of a tensor → how often its `data` was set
_new_data: collections.Counter[int] = collections.Counter()


def count_writes() -> int:
    """Return the number of writes so far; counting begins with the first call, for the whole process."""
    _begin()
    return _count


def watch_attributes(names: Iterable[str]) -> None:
    """Count writes of numbers, texts and the like to attributes of these names, too."""
    _names.update(names)


def count_new_data(tensor: flow.Tensor) -> int:
    """Return how often `tensor.data` was set to another tensor, since counting began."""
    return _new_data[id(tensor)]


@functools.cache
def _begin() -> None:
    for owner, name in (
        (nn.Module, "__delattr__"),
        (nn.Module, "register_buffer"),
        (nn.Module, "register_forward_hook"),
        (nn.Module, "register_forward_pre_hook"),
        (Optimizer, "add_param_group"),
        (ParamGroup, "setdefault"),
        (flow.Tensor, "requires_grad_"),
    ):
        setattr(owner, name, _counting(vars(owner)[name]))
    set_item, set_attribute = ParamGroup.__setitem__, nn.Module.__setattr__

    def set_attribute_of_module(self: nn.Module, name: str, value: Any) -> None:
        set_attribute(self, name, value)
        if not isinstance(value, _PLAIN) or name in _names:
            _add_one()

    nn.Module.__setattr__ = set_attribute_of_module

    def set_setting(self: ParamGroup, key: str, value: Any) -> None:
        set_item(self, key, value)
        if key not in INPUTS:  # schedules write the rate in every iteration
            _add_one()

    ParamGroup.__setitem__ = set_setting
    # whoever reads the dict of settings may write into it
    ParamGroup.options = property(_counting(ParamGroup.options.fget))
    data, needs_gradient = vars(flow.Tensor)["data"], vars(flow.Tensor)["requires_grad"]

    def set_data(self: flow.Tensor, value: flow.Tensor) -> None:
        data.__set__(self, value)
        _new_data[id(self)] += 1
        _add_one()

    flow.Tensor.data = property(data.__get__, set_data)
    flow.Tensor.requires_grad = property(needs_gradient.__get__, _counting(needs_gradient.__set__))


def _add_one() -> None:
    global _count
    _count += 1


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _add_one()
        return result

    return functools.update_wrapper(counted, function) if hasattr(function, "__name__") else counted
