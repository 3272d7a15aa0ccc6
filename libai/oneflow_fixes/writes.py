"""A count of the writes to what a graph is compiled for: attributes of modules, settings of parameter groups, and which
tensors need a gradient.

Comparing all of them before every compiled step would cost more than the step of a small model; reading one number
costs nothing. The count says only that something may have changed, not what (`libai.engine.graph.guards` compares).
Not counted: writes past `__setattr__` (`module.__dict__["x"] = 1`), to attributes of a class, and changes inside lists
and dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.optim.optimizer import Optimizer, ParamGroup

#: settings of a parameter group that are inputs of a compiled step, or that only schedules and eager updates use
INPUTS = ("lr", "initial_lr", "bias_correction1", "bias_correction2")

_count = 0


def count_writes() -> int:
    """Return the number of writes so far; counting begins with the first call, for the whole process."""
    _begin()
    return _count


@functools.cache
def _begin() -> None:
    for owner, name in (
        (nn.Module, "__setattr__"),
        (nn.Module, "__delattr__"),
        (Optimizer, "add_param_group"),
        (ParamGroup, "setdefault"),
        (flow.Tensor, "requires_grad_"),
    ):
        setattr(owner, name, _counting(vars(owner)[name]))
    set_item = ParamGroup.__setitem__

    def set_setting(self: ParamGroup, key: str, value: Any) -> None:
        set_item(self, key, value)
        if key not in INPUTS:  # schedules write the rate in every iteration
            _add_one()

    ParamGroup.__setitem__ = set_setting
    # whoever reads the dict of settings may write into it
    ParamGroup.options = property(_counting(ParamGroup.options.fget))
    needs_gradient = vars(flow.Tensor)["requires_grad"]
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
