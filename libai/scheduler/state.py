"""Save and restore the state of any scheduler, ours or OneFlow's, as JSON values, and detect
metric-based schedulers.

OneFlow's `state_dict` is the scheduler's whole `__dict__`, which may contain callables and other
objects. They are omitted, because the config recreates them. Nothing is pickled.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai.scheduler.factor_lr import FactorLR
from libai.utils.errors import UserError


def initial_lrs(optimizer: Any) -> list[float]:
    """Return the initial learning rate of each parameter group."""
    return [
        float(group["initial_lr"] if "initial_lr" in group else group["lr"])
        for group in optimizer.param_groups
    ]


def scheduler_state(scheduler: Any, optimizer: Any) -> dict[str, Any] | None:
    """Return the state of `scheduler` and the current learning rates of `optimizer` as JSON values.

    The result is `{"class": str, "lrs": [float], "state": {...}}`, or None if `scheduler` is None.
    For a `FactorLR`, `"as_scheduled"` is false if other code has changed the learning rates.
    Infinity, such as the initial `best` of `ReduceLROnPlateau`, is stored as `{"float": "inf"}`,
    because JSON does not support it.

    Raises `UserError` for a custom scheduler that has no state methods or has state that JSON
    cannot represent exactly.
    """
    if scheduler is None:
        return None
    if not has_state(scheduler):
        raise UserError(
            f"The scheduler {type(scheduler).__name__} has no state_dict() or "
            "load_state_dict(state), so a resumed run could not continue it. Add both, use "
            "libai.scheduler.FactorLR(optimizer, function_of_the_iteration), or save nothing "
            "(train.checkpointer.enabled=false)."
        )
    left_out: list[str] = []
    state = _encode(scheduler.state_dict(), "", left_out)
    if left_out and not type(scheduler).state_dict.__module__.startswith("oneflow."):
        raise UserError(
            f"{type(scheduler).__name__}.state_dict() holds {', '.join(left_out)}, which a "
            "checkpoint cannot store, so a resumed run could not continue it. Return only "
            "numbers, text, lists and dicts (array.tolist())."
        )
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    saved = {"class": type(scheduler).__name__, "lrs": rates, "state": state}
    if isinstance(scheduler, FactorLR):
        saved["as_scheduled"] = rates == scheduler.rates()
    return saved


def has_state(scheduler: Any) -> bool:
    """Return True if a scheduler can be saved and restored."""
    return all(
        callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict")
    )


def load_scheduler_state(scheduler: Any, saved: Mapping[str, Any], optimizer: Any) -> None:
    """Restore the result of `scheduler_state` into `scheduler` and the groups of `optimizer`.

    Raises `UserError` if the scheduler's class or the number of parameter groups differs.
    """
    found, wanted = saved["class"], type(scheduler).__name__
    if found != wanted:
        raise UserError(
            f"The saved scheduler is a {found}, but this run's is a {wanted}, so the state does "
            "not fit. Configure lr_scheduler as in the saved run, or start a new schedule: "
            "--resume --reset schedule."
        )
    groups = optimizer.param_groups
    if len(saved["lrs"]) != len(groups):
        raise UserError(
            f"The saved scheduler has {len(saved['lrs'])} parameter group(s), but this run's "
            f"optimizer has {len(groups)}, so learning rates cannot be matched. Use the parameter "
            "group options of the saved run, or start a new schedule: --resume --reset schedule."
        )
    scheduler.load_state_dict(_decode(saved["state"]))
    if saved.get("as_scheduled"):
        return  # the schedule may be longer now, and has written its own rates
    for group, rate in zip(groups, saved["lrs"]):
        group["lr"] = rate


def _encode(value: Any, name: str, left_out: list[str]) -> Any:
    """Return `value` as JSON values.

    An entry that JSON cannot represent is omitted from a dict and null in a list.

    The names of such entries are appended to `left_out`.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        items = {
            str(key): (item, _encode(item, f"{name}{key}.", left_out))
            for key, item in value.items()
        }
        return {
            key: encoded
            for key, (item, encoded) in items.items()
            if encoded is not None or item is None
        }
    if isinstance(value, list | tuple):
        return [_encode(item, f"{name}{index}.", left_out) for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    left_out.append(name.rstrip("."))
    return None


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"float"}:
            return float(value["float"])
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


def needs_metric(scheduler: Any) -> bool:
    """Return True if `scheduler.step` requires an argument.

    Such a scheduler steps after evaluations, with a metric.

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
