"""Kinds of objects in a config: a module where an optimizer belongs is found before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from libai.config.instantiation import describe, target_of
from libai.config.settings.errors import ConfigError

MODULE, OPTIMIZER, SCHEDULE = "a module", "an optimizer", "a schedule"
LOADER, EVALUATOR, HOOK = "a loader", "an evaluator", "a hook"

#: package and name of a base class → what its classes are; by name, so that nothing is imported for it
_BASES = {
    ("oneflow", "Module"): MODULE,
    ("oneflow", "Optimizer"): OPTIMIZER,
    ("oneflow", "LRScheduler"): SCHEDULE,
    ("libai", "Evaluator"): EVALUATOR,
    ("libai", "HookBase"): HOOK,
}
_EXAMPLES = {
    MODULE: "libai.models.MLP, or a class of yours that inherits from oneflow.nn.Module",
    OPTIMIZER: "oneflow.optim.AdamW",
    SCHEDULE: "libai.scheduler.WarmupCosineLR",
    LOADER: "libai.data.build_train_loader",
    EVALUATOR: "libai.evaluation.ClassificationEvaluator",
    HOOK: "a class of yours that inherits from libai.engine.HookBase",
}


def wrong_kind(call: Mapping[str, Any], wanted: str, place: str) -> list[str]:
    """The problem of a LazyCall whose target is known to be something else than `wanted`, in a list; else []."""
    try:
        target = target_of(call)
    except ConfigError:
        return []  # reported with the arguments
    assert target is not None
    found = _kinds_of(target)
    if wanted == EVALUATOR and MODULE in found:
        return []  # a metric may be a module
    if found and wanted not in found:
        return [f"{place}: {describe(target)} is {found[0]}, not {wanted}. Use one such as {_EXAMPLES[wanted]}."]
    return []


def _kinds_of(target: Any) -> list[str]:
    bases = inspect.getmro(target) if inspect.isclass(target) else ()
    named = [(base.__module__.partition(".")[0], base.__name__) for base in bases]
    return [_BASES[name] for name in named if name in _BASES]
