"""Which parameters are trained, and from when: `train.freeze` and `train.unfreeze`."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import oneflow as flow

from libai.config.settings.patterns import names_matching
from libai.engine.setup.batch_plan import BatchPlan
from libai.optim import UNFROZEN_AFTER, Optimizers
from libai.utils.errors import UserError

_EPOCHS = re.compile(r"(\d+(?:\.\d+)?) epochs?")


def freeze(run: Any, model: flow.nn.Module) -> None:
    """Freeze what `train.freeze` names and `train.unfreeze` does not; `freeze_until_due` does the others.

    Raises `UserError` for patterns without a match and when nothing is left to train.
    """
    named = dict(model.named_parameters())
    frozen = names_matching(run.train.freeze or (), list(named), "train.freeze")
    later = _unfrozen_later(run, model)
    for name in frozen:
        named[name].requires_grad_(name in later)
    if frozen and not any(named[name].requires_grad for name in named.keys() - later.keys()):
        raise UserError(
            f"train.freeze leaves none of the {len(named)} parameters of {type(model).__name__} to train. Take a "
            "pattern out of it."
        )


def split_groups(run: Any, model: flow.nn.Module, optimizer: flow.optim.Optimizer) -> flow.optim.Optimizer:
    """`optimizer` with groups of their own for the parameters that are unfrozen later: an optimizer that corrects its
    bias counts the updates of a group."""
    later = _unfrozen_later(run, model)
    if not later:
        return optimizer
    when = {id(parameter): later.get(name) for name, parameter in model.named_parameters()}
    groups: list[Any] = []
    for group in optimizer.param_groups:
        for point in dict.fromkeys(when[id(parameter)] for parameter in group.parameters):
            part = copy.copy(group)
            part._options = dict(group._options)
            part._parameters = [parameter for parameter in group.parameters if when[id(parameter)] == point]
            groups.append(part)
    optimizer.param_groups = groups
    return optimizer if isinstance(optimizer, Optimizers) else Optimizers({"optim": optimizer})


def freeze_until_due(
    run: Any, model: flow.nn.Module, optimizer: flow.optim.Optimizer, plan: BatchPlan, completed: int
) -> list[str]:
    """Freeze or unfreeze what `train.unfreeze` names, as it is to be after `completed` iterations; returns the names
    of the parameters that were unfrozen by this."""
    later = _unfrozen_later(run, model)
    named, due = dict(model.named_parameters()), {}
    for name, when in later.items():
        due[id(named[name])] = iteration = _iteration(when, plan)
        named[name].requires_grad_(completed >= iteration)
    for group in optimizer.param_groups if later else ():
        group[UNFROZEN_AFTER] = due.get(id(group.parameters[0]), 0)
    return [name for name in later if named[name].requires_grad]


def unfreezing_iterations(run: Any, plan: BatchPlan) -> list[int]:
    """After how many iterations parameters are unfrozen."""
    return sorted({_iteration(when, plan) for when in (run.train.unfreeze or {}).values()})


def _unfrozen_later(run: Any, model: flow.nn.Module) -> dict[str, Any]:
    """Frozen parameter → when it is unfrozen, by the first pattern that fits it."""
    if not (patterns := run.train.unfreeze or {}):
        return {}
    names = [name for name, _ in model.named_parameters()]
    frozen = set(names_matching(run.train.freeze or (), names, "train.freeze"))
    found: dict[str, Any] = {}
    for pattern, when in patterns.items():
        fitting = frozen.intersection(names_matching([pattern], names, "train.unfreeze"))
        if not fitting:
            raise UserError(
                f"train.unfreeze has {pattern!r}, and train.freeze freezes none of the parameters that it fits. Add "
                "them to train.freeze, or remove the pattern."
            )
        found.update({name: when for name in names if name in fitting and name not in found})
    return found


def _iteration(when: Any, plan: BatchPlan) -> int:
    if isinstance(when, int) and not isinstance(when, bool) and when >= 1:
        return when
    epochs = _EPOCHS.fullmatch(when) if isinstance(when, str) else None
    if epochs is None:
        raise UserError(
            f"train.unfreeze has {when!r} for a pattern. Give the number of iterations after which its parameters are "
            "trained (500), or of epochs ('2 epochs')."
        )
    if plan.iters_per_epoch is None:
        raise UserError(
            f"train.unfreeze has {when!r}, and the training loader has no samples_per_epoch, so the length of an epoch "
            "is unknown. Give a number of iterations."
        )
    return max(1, math.ceil(float(epochs[1]) * plan.iters_per_epoch))
