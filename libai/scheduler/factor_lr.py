"""The only scheduler class of libai.

It multiplies each group's initial learning rate by a function of the iteration.

A second function may multiply the initial momentum. `in_sequence`, `by_optimizer` and
`with_momentum` combine schedulers.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import oneflow as flow
from oneflow.nn.optimizer.lr_scheduler import LRScheduler

from libai.scheduler import schedules
from libai.scheduler.schedules import Schedule
from libai.utils.errors import UserError

_logger = logging.getLogger(__name__)


class FactorLR(LRScheduler):
    """Set `group["lr"] = initial_lr * factor(iteration)` in every parameter group of `optimizer`.

    The constructor sets the learning rates of iteration 0. Call `step()` once per iteration, after
    the update. Groups may have different initial learning rates, which OneFlow's `WarmUpLR` does
    not support. This class inherits from OneFlow's `LRScheduler` to pass type checks in user code.
    It has no compiled form and needs none, since both modes read the learning rates from the
    optimizer in each iteration.

    Args:
        factor: schedule for all groups, or a sequence with one schedule per group.
        momentum_factor: schedule that multiplies the initial momentum (the first of `betas` for
            Adam and its variants). Works only in eager mode, because a compiled update treats
            momentum as a constant.
        length: number of iterations for which the schedule was made, including `warmup_iter`
            iterations of warm-up.
    """

    base_lrs: list[float]

    def __init__(
        self,
        optimizer: flow.optim.Optimizer,
        factor: Schedule | Sequence[Schedule],
        *,
        momentum_factor: Schedule | None = None,
        length: int | None = None,
        warmup_iter: int = 0,
    ) -> None:
        self.factor: Any = factor
        self.momentum_factor = momentum_factor
        self.length, self.warmup_iter = length, warmup_iter
        self.base_momenta: list[float] = []
        if momentum_factor is not None:
            self.base_momenta = [_momentum(group) for group in optimizer.param_groups]
            for momentum in self.base_momenta:
                require_range(
                    momentum_factor, length or 0, "momentum", momentum, sys.float_info.min, 1.0
                )
        super().__init__(optimizer)

    def step(self) -> None:
        """Advance to the next iteration and write its learning rates to the optimizer."""
        self.last_step += 1
        self._write_rates()

    def state_dict(self) -> dict[str, Any]:
        """Return `{"last_step": int, "base_lrs": [float], "base_momenta": [float]}`.

        The schedule itself is in the config. `base_momenta` is empty without a momentum schedule.
        """
        return {
            "last_step": self.last_step,
            "base_lrs": self.base_lrs,
            "base_momenta": self.base_momenta,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the iteration and initial learning rates from a `state_dict`, and write the rates
        to the optimizer.

        Saved initial rates take precedence over those in the config, so a resumed run continues its
        curve. A difference is logged.
        """
        saved = [float(lr) for lr in state_dict["base_lrs"]]
        if saved != self.base_lrs:
            _logger.warning(
                "initial learning rates %s of the saved run replace %s of the config",
                saved,
                self.base_lrs,
            )
        self.base_lrs = saved
        for group, base_lr in zip(self.optimizer.param_groups, saved):
            group["initial_lr"] = base_lr
        if self.base_momenta:
            self.base_momenta = [
                float(momentum) for momentum in state_dict["base_momenta"] or self.base_momenta
            ]
        self.last_step = int(state_dict["last_step"])
        self._write_rates()

    def rates(self) -> list[float]:
        """Return the learning rate of each group in the current iteration."""
        if callable(self.factor):
            factor = self.factor(self.last_step)
            return [base_lr * factor for base_lr in self.base_lrs]
        return [
            base_lr * factor(self.last_step) for base_lr, factor in zip(self.base_lrs, self.factor)
        ]

    def _write_rates(self) -> None:
        self.update_lrs(self.rates())
        if self.momentum_factor is None:
            return
        factor = self.momentum_factor(self.last_step)
        for group, momentum in zip(self.optimizer.param_groups, self.base_momenta):
            if "betas" in group:
                group["betas"] = (momentum * factor, *group["betas"][1:])
            else:
                group["momentum"] = momentum * factor


def in_sequence(
    optimizer: flow.optim.Optimizer, parts: Sequence[FactorLR], max_iter: int
) -> FactorLR:
    """Return one scheduler that runs `parts` in sequence, each for its `length`, in a run of
    `max_iter` iterations.

    Raises `UserError` if a part would start after the end of the run.
    """
    start = 0
    for index, part in enumerate(parts):
        _require_factor(part, f"part {index} of the list of schedules")
        if start >= max_iter:
            raise UserError(
                f"part {index} of the list of schedules would begin after {start} iterations, but "
                f"the run has {max_iter}. Make the parts before it shorter (max_iter or "
                "max_epoch), or train longer."
            )
        start += part.length or max_iter - start
    factor = schedules.in_sequence([(part.factor, part.length or 0) for part in parts])
    return FactorLR(optimizer, factor, length=start, warmup_iter=parts[0].warmup_iter)


def by_optimizer(optimizer: flow.optim.Optimizer, parts: Mapping[str, Any]) -> FactorLR:
    """Return one scheduler for several optimizers, with `parts` by optimizer name.

    Others keep their learning rate.
    """
    for name, part in parts.items():
        _require_factor(part, f"the schedule of the optimizer {name!r}")
    factors = {name: part.factor for name, part in parts.items()}
    return FactorLR(
        optimizer,
        [factors.get(group["optimizer"], schedules.constant()) for group in optimizer.param_groups],
        length=max(part.length or 0 for part in parts.values()),
        warmup_iter=max(part.warmup_iter for part in parts.values()),
    )


def with_momentum(optimizer: flow.optim.Optimizer, rates: Any, momentum: Any) -> FactorLR:
    """Return one scheduler with the learning rates of `rates` (None: constant) and the momentum of
    `momentum`.
    """
    _require_factor(momentum, "momentum_scheduler")
    if rates is None:
        rates = FactorLR(optimizer, schedules.constant())
    _require_factor(rates, "lr_scheduler (next to a momentum_scheduler)")
    return FactorLR(
        optimizer,
        rates.factor,
        momentum_factor=momentum.factor,
        length=momentum.length,
        warmup_iter=rates.warmup_iter,
    )


def _require_factor(schedule: Any, what: str) -> None:
    if not isinstance(schedule, FactorLR):
        raise UserError(
            f"{what} is a {type(schedule).__name__}, but only schedules of libai.scheduler can be "
            "combined. Use one of them or FactorLR, or use your own scheduler without a list."
        )


def require_range(
    schedule: Schedule,
    length: int,
    what: str,
    initial: float = 1.0,
    least: float = 0.0,
    below: float = math.inf,
) -> None:
    """Raise `UserError` if a value is out of bounds at any of about a hundred points within
    `length` iterations.
    """
    for step in range(0, length + 1, max(1, length // 100)):
        value = initial * schedule(step)
        if not least <= value < below:
            raise UserError(
                f"this schedule multiplies the {what} by {schedule(step):.6g} at iteration {step} "
                f"of {length}, which gives {value:.6g}; it must be at least {least:.3g} and below "
                f"{below}. Check its factors, its gamma and its decay."
            )


def _momentum(group: Any) -> float:
    momentum = 0.0
    if "betas" in group:
        momentum = group["betas"][0]
    elif "momentum" in group:
        momentum = group["momentum"]
    if momentum <= 0:
        raise UserError(
            "a momentum schedule needs an optimizer with momentum: use SGD with momentum above 0, "
            "Adam, AdamW or LAMB, or remove momentum_scheduler."
        )
    return float(momentum)
