"""Builders for configs, which bind a schedule to an optimizer, `lr_scheduler = LazyCall(WarmupCosineLR)(...)`.

Every `Warmup…` builder takes `optimizer, max_iter` (the run's iterations, which the engine fills in), the warm-up's
`warmup_iter, warmup_factor, warmup_method`, and `by, iters_per_epoch, max_epoch, warmup_epoch`: `@_with_warmup` adds
them to what a schedule takes itself. `max_iter` and `warmup_iter` count iterations; `max_epoch` and `warmup_epoch` say
the same in epochs, of `iters_per_epoch` iterations, which the engine fills in too. With `by="epoch"` the lengths that
are the schedule's own (`milestones`, `step_size`, `cycle_iter`, `decay_iter`, `timescale`, the exponent of `gamma`)
count epochs, and after the warm-up the rate changes at epoch boundaries only. The names follow LiBai, so they are
written like classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from oneflow.optim import Optimizer

from libai.scheduler import schedules
from libai.scheduler.factor_lr import FactorLR, require_range
from libai.scheduler.schedules import Schedule
from libai.scheduler.state import initial_lrs
from libai.utils.errors import UserError


@dataclass(frozen=True)
class _Run:
    """Values on which a schedule may depend next to its own arguments. `unit`: iterations in one of its own lengths."""

    optimizer: Optimizer
    max_iter: int
    warmup_iter: int
    unit: float

    def iters(self, name: str, length: float) -> int:
        """The argument `name`, a length of the schedule's own, in iterations."""
        return _positive(name, int(length * self.unit))


def _with_warmup(shape: Callable[..., Schedule]) -> Callable[..., FactorLR]:
    """The builder of `shape(run, own arguments…)`, with a warm-up in front.

    Its signature, which `LazyCall` and the checks of a config read, is that of `_build` around the arguments of
    `shape`: those without a default stand before the warm-up's, the others behind.
    """
    _, *own = inspect.signature(shape).parameters.values()
    _, optimizer, max_iter, warmup_iter, warmup_factor, *rest = inspect.signature(_build).parameters.values()
    required = [parameter for parameter in own if parameter.default is parameter.empty]
    optional = [parameter for parameter in own if parameter.default is not parameter.empty]
    parameters = [optimizer, max_iter, *required, warmup_iter, warmup_factor, *optional, *rest]
    signature = inspect.Signature(parameters, return_annotation="FactorLR")

    @functools.wraps(shape)
    def builder(*args: object, **kwargs: object) -> FactorLR:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{shape.__name__}(): {error}") from None
        options = {parameter.name: given.pop(parameter.name) for parameter in own if parameter.name in given}
        return _build(functools.partial(shape, **options), **given)

    builder.__signature__ = signature  # type: ignore[attr-defined]
    builder.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return builder


def _build(
    shape: Callable[[_Run], Schedule],
    optimizer: Optimizer,
    max_iter: int,
    warmup_iter: int = 0,
    warmup_factor: float = 0.001,
    warmup_method: str = "linear",
    by: str = "iter",
    iters_per_epoch: float | None = None,
    max_epoch: float | None = None,
    warmup_epoch: float | None = None,
) -> FactorLR:
    """The schedule held per epoch where asked, with a checked warm-up in front, bound to `optimizer`."""
    _require_one_of("by", by, ("iter", "epoch"))
    _require_one_of("warmup_method", warmup_method, ("linear", "constant"))
    unit = _epoch(iters_per_epoch, "by='epoch'") if by == "epoch" else 1
    if max_epoch is not None:
        max_iter = _positive(
            f"max_epoch={max_epoch:g} epochs: max_iter",
            schedules.first_iter(max_epoch, _epoch(iters_per_epoch, f"max_epoch={max_epoch:g}")),
        )
    if warmup_epoch is not None:
        if warmup_iter:
            raise UserError(
                f"warmup_epoch={warmup_epoch:g} and a warm-up of {warmup_iter} iterations (warmup_iter or "
                "train.warmup_ratio) mean the same. Give one of them."
            )
        warmup_iter = schedules.first_iter(warmup_epoch, _epoch(iters_per_epoch, f"warmup_epoch={warmup_epoch:g}"))
    schedule = shape(_Run(optimizer, max_iter, warmup_iter, unit))
    if not 0 <= warmup_iter <= max_iter:
        raise UserError(
            f"The warm-up of {warmup_iter} iterations does not fit into the run of {max_iter} (max_iter). "
            f"Choose warmup_iter (or train.warmup_ratio) between 0 and {max_iter} iterations."
        )
    if warmup_factor < 0:  # also without a warm-up, in which it would have no effect
        raise UserError(f"warmup_factor={warmup_factor} would make the learning rate negative. Use 0 or more.")
    if by == "epoch":
        schedule = schedules.held_per_epoch(schedule, unit)
    schedule = schedules.with_warmup(schedule, warmup_iter, warmup_factor, warmup_method)
    require_range(schedule, max_iter, "learning rate")
    return FactorLR(optimizer, schedule, length=max_iter, warmup_iter=warmup_iter)


@_with_warmup
def WarmupConstantLR(run: _Run) -> Schedule:
    """The initial rate all along, after a warm-up."""
    return schedules.constant()


@_with_warmup
def WarmupCosineLR(run: _Run, alpha: float = 0.0) -> Schedule:
    """Cosine decay to `alpha` times the initial rate at `max_iter`."""
    return schedules.cosine(_positive("max_iter", run.max_iter), end=alpha)


@_with_warmup
def WarmupCosineAnnealingLR(
    run: _Run,
    eta_min: float = 0.0,
    cycle_iter: int | None = None,
    cycle_mult: int = 1,
    cycle_decay: float = 1.0,
) -> Schedule:
    """Cosine decay to the rate `eta_min` at `max_iter`, or with `cycle_iter` warm restarts.

    Cycle c lasts `cycle_iter * cycle_mult**c` and starts at `cycle_decay**c` of the initial rate. `eta_min` is a rate:
    it holds for the group with the highest initial rate, and the others keep their proportion to it.
    """
    end = _as_factor(run.optimizer, eta_min)
    if cycle_iter is None:
        return schedules.cosine(_positive("max_iter", run.max_iter), end=end)
    cycle = run.iters("cycle_iter", cycle_iter)
    return schedules.cosine_restarts(cycle, _positive("cycle_mult", cycle_mult), cycle_decay, end=end)


@_with_warmup
def WarmupMultiStepLR(run: _Run, milestones: Sequence[float], gamma: float = 0.1) -> Schedule:
    """Times `gamma` at each of `milestones`: iterations (or epochs), or fractions of `max_iter` when below 1."""
    points = [round(point * run.max_iter) if 0 < point < 1 else int(int(point) * run.unit) for point in milestones]
    if any(later <= earlier for earlier, later in zip(points, points[1:])) or any(point < 0 for point in points):
        raise UserError(
            f"WarmupMultiStepLR: milestones={list(milestones)} are the iterations {points}, which do not increase. "
            "Give increasing iterations, or increasing fractions of max_iter between 0 and 1."
        )
    return schedules.multi_step(points, gamma)


@_with_warmup
def WarmupStepLR(run: _Run, step_size: int, gamma: float = 0.1) -> Schedule:
    """Times `gamma` every `step_size` iterations (or epochs)."""
    return schedules.every_step(run.iters("step_size", step_size), gamma)


@_with_warmup
def WarmupExponentialLR(run: _Run, gamma: float) -> Schedule:
    """Times `gamma` each iteration (or each epoch)."""
    return schedules.every_step(int(run.unit), gamma) if run.unit > 1 else schedules.exponential(gamma)


@_with_warmup
def WarmupPolynomialLR(
    run: _Run, end_learning_rate: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> Schedule:
    """`(1 - iteration / max_iter) ** power` down to the rate `end_learning_rate`.

    `end_learning_rate` holds for the group with the highest initial rate; the others keep their proportion to it.
    """
    end = _as_factor(run.optimizer, end_learning_rate)
    return schedules.polynomial(_positive("max_iter", run.max_iter), power, end=end, cycle=cycle)


@_with_warmup
def WarmupLinearLR(run: _Run, end_factor: float = 0.0) -> Schedule:
    """A straight line from the initial rate to `end_factor` times it at `max_iter`."""
    return schedules.polynomial(_positive("max_iter", run.max_iter), end=end_factor)


@_with_warmup
def WarmupInverseSqrtLR(run: _Run, timescale: int | None = None) -> Schedule:
    """`sqrt(timescale / iteration)` after the first `timescale` iterations (default: the warm-up, or 1 without one)."""
    length = max(run.warmup_iter, 1) if timescale is None else run.iters("timescale", timescale)
    return schedules.inverse_sqrt(length)


@_with_warmup
def WarmupStableDecayLR(
    run: _Run,
    decay_ratio: float = 0.2,
    decay_iter: int | None = None,
    end_factor: float = 0.0,
    decay_shape: str = "linear",
) -> Schedule:
    """Warm-up, the initial rate, then a decay to `end_factor` over the last part of the run.

    The last part is `decay_ratio * max_iter` iterations, or `decay_iter` when given. `decay_shape`: `"linear"`,
    `"cosine"` or `"sqrt"`.
    """
    _require_one_of("decay_shape", decay_shape, schedules.DECAY_SHAPES)
    max_iter = run.max_iter
    length = round(decay_ratio * max_iter) if decay_iter is None else int(decay_iter * run.unit)
    if not 0 <= length <= max_iter:
        raise UserError(
            f"WarmupStableDecayLR: the decay lasts {length} iterations, but the run has {max_iter} (max_iter). "
            "Make decay_ratio (0 to 1) or decay_iter smaller."
        )
    return schedules.stable_decay(_positive("max_iter", max_iter), length, end=end_factor, shape=decay_shape)


def OneCycleLR(
    optimizer: Optimizer,
    max_iter: int,
    rise_ratio: float = 0.3,
    start_factor: float = 0.04,
    end_factor: float = 4e-6,
) -> FactorLR:
    """Cosines from `start_factor` up to the initial rate over `rise_ratio` of the run, then down to `end_factor`."""
    if not 0 <= rise_ratio < 1:
        raise UserError(f"OneCycleLR: rise_ratio={rise_ratio} is the rising part of the run: give 0 <= rise_ratio < 1.")
    rise_iter = round(rise_ratio * (_positive("max_iter", max_iter) - 1))
    schedule = schedules.one_cycle(max_iter, rise_iter, start_factor, end_factor)
    require_range(schedule, max_iter, "learning rate")
    return FactorLR(optimizer, schedule, length=max_iter)


def _epoch(iters_per_epoch: float | None, asked: str) -> float:
    """Iterations of an epoch, for which `asked` asks."""
    if not iters_per_epoch or iters_per_epoch < 1:
        raise UserError(
            f"{asked} needs to know how long an epoch is, but iters_per_epoch={iters_per_epoch}. Give iters_per_epoch "
            "(samples per epoch / global batch size, which a loader with samples_per_epoch tells), or count iterations."
        )
    return iters_per_epoch


def _require_one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise UserError(f"{name}={value!r} is unknown. Use {' or '.join(map(repr, known))}.")


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise UserError(f"{name}={value} is a number of iterations: give 1 or more.")
    return int(value)


def _as_factor(optimizer: Optimizer, rate: float) -> float:
    """`rate` as a share of the highest initial rate among the groups."""
    highest = max(initial_lrs(optimizer))
    return rate / highest if highest > 0 else 0.0
