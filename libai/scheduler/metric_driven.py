"""Schedules that follow a metric instead of the iteration, such as OneFlow's `ReduceLROnPlateau`."""

from __future__ import annotations

import inspect
from typing import Any


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
