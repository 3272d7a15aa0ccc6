"""Kinds of objects in a config: a module where an optimizer belongs is found before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from libai.config.instantiation import describe

#: package and name of a base class -> what its classes are; by name, so that nothing is imported for it
_BASES = {
    ("oneflow", "Module"): "a module",
    ("oneflow", "Optimizer"): "an optimizer",
    ("oneflow", "LRScheduler"): "a schedule",
    ("libai", "Evaluator"): "an evaluator",
    ("libai", "HookBase"): "a hook",
}
_EXAMPLES = {
    "a module": "libai.models.MLP, or a class of yours that inherits from oneflow.nn.Module",
    "an optimizer": "oneflow.optim.AdamW",
    "a schedule": "libai.scheduler.WarmupCosineLR",
    "a loader": "libai.data.build_train_loader",
    "an evaluator": "libai.evaluation.ClassificationEvaluator",
    "a hook": "a class of yours that inherits from libai.engine.HookBase",
}


def wrong_kind(target: Callable[..., Any], wanted: str, place: str) -> str:
    """Return the problem of a target that is known to be something else than `wanted`, or the empty string."""
    bases = inspect.getmro(target) if inspect.isclass(target) else ()
    named = [(base.__module__.partition(".")[0], base.__name__) for base in bases]
    found = [_BASES[name] for name in named if name in _BASES]
    if not found or not wanted or wanted in found:
        return ""
    return f"{place}: {describe(target)} is {found[0]}, not {wanted}. Use one such as {_EXAMPLES[wanted]}."
