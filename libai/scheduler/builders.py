"""Build schedulers for configs by binding a schedule to an optimizer: `lr_scheduler =
LazyCall(WarmupCosineLR)(...)`.

Every `Warmup…` builder takes `optimizer, max_iter`, the arguments of its schedule, and the
arguments added by `@_with_warmup`: `warmup_iter, warmup_factor, warmup_method`, and `by,
iters_per_epoch, max_epoch, warmup_epoch`. `max_iter` is the length of the run in iterations; the
engine sets it. `max_iter` and `warmup_iter` count iterations. `max_epoch` and `warmup_epoch`
replace them and count epochs of `iters_per_epoch` iterations, which the engine also sets. With
`by="epoch"`, the arguments of a schedule (`milestones`, `step_size`, the exponent of `gamma`) count
epochs, and after the warm-up the learning rate changes only at epoch boundaries. The functions are
named like classes because their names follow LiBai.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow.optim import Optimizer

from libai.scheduler import schedules
from libai.scheduler.factor_lr import FactorLR, require_range
from libai.scheduler.schedules import Schedule
from libai.scheduler.state import initial_lrs
from libai.utils.errors import UserError
from libai.utils.sizes import check_known, check_range, check_sizes


@dataclass(frozen=True)
class _Run:
    """Values that a schedule may depend on.

    `unit` is the number of iterations per unit of the schedule's arguments.
    """

    optimizer: Optimizer
    max_iter: int
    unit: float

    def as_factor(self, rate: float) -> float:
        """Return `rate` as a fraction of the highest initial learning rate of the groups."""
        highest = max(initial_lrs(self.optimizer))
        return rate / highest if highest > 0 else 0.0


def _with_warmup(shape: Callable[..., Schedule]) -> Callable[..., FactorLR]:
    """Return a builder for the schedule `shape(run, own arguments…)`, preceded by a warm-up.

    The builder's signature is `optimizer, max_iter`, the arguments of `shape` except `run`, and the
    remaining arguments of `_build` as keywords. `LazyCall` and the config checks read this
    signature.
    """
    own = list(inspect.signature(shape).parameters.values())[1:]
    _, optimizer, max_iter, *warmup = inspect.signature(_build).parameters.values()
    parameters = [optimizer, max_iter, *own, *warmup]
    signature = inspect.Signature(parameters, return_annotation="FactorLR")

    @functools.wraps(shape)
    def builder(*args: Any, **kwargs: Any) -> FactorLR:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{shape.__name__}(): {error}") from None
        options = {
            parameter.name: given.pop(parameter.name)
            for parameter in own
            if parameter.name in given
        }
        return _build(functools.partial(shape, **options), **given)

    builder.__signature__ = signature  # type: ignore[attr-defined]
    builder.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return builder


def _build(
    shape: Callable[[_Run], Schedule],
    optimizer: Optimizer,
    max_iter: int,
    *,
    warmup_iter: int = 0,
    warmup_factor: float = 0.001,
    warmup_method: str = "linear",
    by: str = "iter",
    iters_per_epoch: float | None = None,
    max_epoch: float | None = None,
    warmup_epoch: float | None = None,
) -> FactorLR:
    """Return the schedule bound to `optimizer`, after a validated warm-up and constant within
    epochs if requested.
    """
    check_known("by", by, ("iter", "epoch"))
    check_known("warmup_method", warmup_method, ("linear", "constant"))
    unit = _epoch(iters_per_epoch, "by='epoch'") if by == "epoch" else 1
    if max_epoch is not None:
        max_iter = schedules.first_iter(
            max_epoch, _epoch(iters_per_epoch, f"max_epoch={max_epoch:g}")
        )
    if warmup_epoch is not None:
        if warmup_iter:
            raise UserError(
                f"warmup_epoch={warmup_epoch:g} and a warm-up of {warmup_iter} iterations "
                "(warmup_iter or train.warmup_ratio) mean the same. Set one of them."
            )
        warmup_iter = schedules.first_iter(
            warmup_epoch, _epoch(iters_per_epoch, f"warmup_epoch={warmup_epoch:g}")
        )
    check_sizes(max_iter=max_iter)
    if not 0 <= warmup_iter <= max_iter:
        raise UserError(
            f"The warm-up of {warmup_iter} iterations does not fit into the run of {max_iter} "
            f"(max_iter). Choose warmup_iter (or train.warmup_ratio) between 0 and {max_iter} "
            "iterations."
        )
    # checked even without a warm-up, when it has no effect
    check_range("0 <= x < inf", warmup_factor=warmup_factor)
    schedule = shape(_Run(optimizer, max_iter, unit))
    if by == "epoch":
        schedule = schedules.held_per_epoch(schedule, unit)
    schedule = schedules.with_warmup(schedule, warmup_iter, warmup_factor, warmup_method)
    require_range(schedule, max_iter, "learning rate")
    return FactorLR(optimizer, schedule, length=max_iter, warmup_iter=warmup_iter)


@_with_warmup
def WarmupConstantLR(run: _Run) -> Schedule:
    """Return a schedule with a warm-up, then the initial learning rate."""
    return schedules.constant()


@_with_warmup
def WarmupCosineLR(run: _Run, alpha: float = 0.0) -> Schedule:
    """Return a cosine decay to `alpha` times the initial learning rate at `max_iter`."""
    return schedules.cosine(run.max_iter, end=alpha)


@_with_warmup
def WarmupCosineAnnealingLR(run: _Run, eta_min: float = 0.0) -> Schedule:
    """Return a cosine decay to the learning rate `eta_min` at `max_iter`.

    `eta_min` applies to the group with the highest initial learning rate. The other groups keep
    their proportion to it.
    """
    return schedules.cosine(run.max_iter, end=run.as_factor(eta_min))


@_with_warmup
def WarmupMultiStepLR(run: _Run, milestones: Sequence[float], gamma: float = 0.1) -> Schedule:
    """Return a schedule that multiplies the learning rate by `gamma` at each milestone.

    Milestones are iterations (or epochs), or fractions of `max_iter` if below 1.
    """
    points = [
        round(point * run.max_iter) if 0 < point < 1 else schedules.first_iter(int(point), run.unit)
        for point in milestones
    ]
    if points != sorted(set(points)) or min(points, default=0) < 0:
        raise UserError(
            f"WarmupMultiStepLR: milestones={list(milestones)} are the iterations {points}, which "
            "do not increase. Use increasing iterations, or increasing fractions of max_iter "
            "between 0 and 1."
        )
    return schedules.multi_step(points, gamma)


@_with_warmup
def WarmupStepLR(run: _Run, step_size: int, gamma: float = 0.1) -> Schedule:
    """Return a schedule that multiplies the learning rate by `gamma` every `step_size` iterations
    (or epochs).
    """
    check_sizes(step_size=step_size)
    return schedules.every_step(step_size, gamma, run.unit)


@_with_warmup
def WarmupExponentialLR(run: _Run, gamma: float) -> Schedule:
    """Return a schedule that multiplies the learning rate by `gamma` every iteration (or epoch)."""
    return schedules.every_step(1, gamma, run.unit)


@_with_warmup
def WarmupPolynomialLR(
    run: _Run, end_learning_rate: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> Schedule:
    """Return a schedule that decays to `end_learning_rate` as `(1 - iteration / max_iter) **
    power`.

    `end_learning_rate` applies to the group with the highest initial learning rate. The other
    groups keep their proportion to it.
    """
    return schedules.polynomial(
        run.max_iter, power, end=run.as_factor(end_learning_rate), cycle=cycle
    )


@_with_warmup
def WarmupLinearLR(run: _Run, end_factor: float = 0.0) -> Schedule:
    """Return a linear decay to `end_factor` times the initial learning rate at `max_iter`."""
    return schedules.polynomial(run.max_iter, end=end_factor)


def _epoch(iters_per_epoch: float | None, asked: str) -> float:
    """Return `iters_per_epoch`.

    Raises `UserError` if it is missing; `asked` is the setting that needs it.
    """
    if not iters_per_epoch or iters_per_epoch < 1:
        raise UserError(
            f"{asked} needs the length of an epoch, but iters_per_epoch={iters_per_epoch}. Pass "
            "iters_per_epoch (samples per epoch / global batch size, known for a loader with "
            "samples_per_epoch), or count iterations."
        )
    return iters_per_epoch
