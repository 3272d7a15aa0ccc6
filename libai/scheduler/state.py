"""State of any scheduler, ours or OneFlow's, as JSON values; and whether it follows a metric.

OneFlow's `state_dict` is the object's whole `__dict__`: callables and other objects may be in it. They are left out
(they come from the config again) and reported by name; nothing is pickled.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai.utils.errors import UserError

_LEFT_OUT = object()


def initial_lrs(optimizer: Any) -> list[float]:
    """The rate that each parameter group began with."""
    return [float(group["initial_lr"] if "initial_lr" in group else group["lr"]) for group in optimizer.param_groups]


def scheduler_state(scheduler: Any, optimizer: Any = None) -> dict[str, Any]:
    """The state of `scheduler` and the current rates of its optimizer's groups, as JSON values.

    `optimizer`: whose rates it sets; default: `scheduler.optimizer`. Returns `{"class": str, "lrs": [float],
    "state": {...}, "left_out": [names]}`. `left_out` names what JSON cannot hold in the state of OneFlow's own
    schedulers, which is all of their attributes, such as the functions of a callable object; plain lambdas of
    `LambdaLR` are not state. Infinity (the initial `best` of `ReduceLROnPlateau`) is kept as `{"float": "inf"}`,
    because JSON has no such number.

    Raises `UserError` for a scheduler of the user's own that has no state, or one that JSON cannot hold exactly.
    """
    if not has_state(scheduler):
        raise UserError(
            f"The state of the scheduler {type(scheduler).__name__} is to be saved, but it lacks state_dict() or "
            "load_state_dict(state), so a resumed run could not continue its curve. Add both, or build it as "
            "libai.scheduler.FactorLR(optimizer, function_of_the_iteration), or save nothing "
            "(train.checkpointer.enabled=false)."
        )
    left_out: list[str] = []
    state = _encode(scheduler.state_dict(), "", left_out)
    if left_out and not type(scheduler).state_dict.__module__.startswith("oneflow."):
        raise UserError(
            f"{type(scheduler).__name__}.state_dict() holds {', '.join(left_out)}, which a checkpoint cannot hold, so "
            "a resumed run could not continue its curve. Return numbers, text, lists and dicts only (array.tolist())."
        )
    groups = _optimizer_of(scheduler, optimizer).param_groups
    rates = [float(group["lr"]) for group in groups]
    return {"class": type(scheduler).__name__, "lrs": rates, "state": state, "left_out": left_out}


def has_state(scheduler: Any) -> bool:
    """Return True if a scheduler can be saved and taken back."""
    return all(callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict"))


def _optimizer_of(scheduler: Any, optimizer: Any) -> Any:
    found = getattr(scheduler, "optimizer", None) if optimizer is None else optimizer
    if found is None:
        raise UserError(
            f"{type(scheduler).__name__} has no attribute optimizer, so its rates cannot be read. Give the optimizer."
        )
    return found


def load_scheduler_state(scheduler: Any, saved: Mapping[str, Any], optimizer: Any = None) -> list[str]:
    """Restore what `scheduler_state` returned, and the rates in the optimizer's groups.

    Returns the names that were left out when saving and therefore keep the values of the config. Raises `UserError`
    when the scheduler is of another class or the optimizer has another number of groups.
    """
    found, wanted = saved["class"], type(scheduler).__name__
    if found != wanted:
        raise UserError(
            f"The saved scheduler is a {found}, this run's is a {wanted}, so its state does not fit. "
            f"Configure lr_scheduler as in the saved run, or start it again: --resume --reset schedule."
        )
    groups = _optimizer_of(scheduler, optimizer).param_groups
    if len(saved["lrs"]) != len(groups):
        raise UserError(
            f"The saved scheduler has {len(saved['lrs'])} parameter group(s), this run's optimizer has {len(groups)}, "
            "so the rates cannot be matched. Use the parameter group options of the saved run, or start the schedule "
            "again: --resume --reset schedule."
        )
    scheduler.load_state_dict(_decode(saved["state"]))
    for group, rate in zip(groups, saved["lrs"]):
        group["lr"] = rate
    return list(saved.get("left_out", []))


def _encode(value: Any, name: str, left_out: list[str]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items = {str(key): _encode(item, f"{name}{key}.", left_out) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        # a place in a list keeps its position, so what cannot be stored becomes null
        items_ = [_encode(item, f"{name}{index}.", left_out) for index, item in enumerate(value)]
        return [None if item is _LEFT_OUT else item for item in items_]
    left_out.append(name.rstrip("."))
    return _LEFT_OUT


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"float"}:
            return float(value["float"])
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


def needs_metric(scheduler: Any) -> bool:
    """True when `scheduler.step` cannot be called without an argument: it is stepped after evaluations, with a metric.

    >>> class Plateau:
    ...     def step(self, metrics): ...
    >>> needs_metric(Plateau()), needs_metric(None)
    (True, False)
    """
    if scheduler is None:
        return False
    parameters = inspect.signature(scheduler.step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind in positional for p in parameters)
