"""Learning rate schedules as pure functions: iteration -> factor for the initial learning rate.

A `Schedule` has no optimizer and no state, so any point can be computed, plotted or compared
without stepping through the schedule. Iteration 0 is the first update; a run of `max_iter` updates
uses 0 … `max_iter - 1`. The builders in `libai.scheduler.builders` bind schedules to optimizers.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """Return a schedule that is 1 at every iteration.

    >>> constant()(1000)
    1.0
    """
    return lambda step: 1.0


def cosine(max_iter: int, end: float = 0.0) -> Schedule:
    """Return half a cosine from 1 to `end` at `max_iter`, then constant `end` (one cycle of SGDR,
    arXiv:1608.03983).

    >>> [round(cosine(4)(step), 3) for step in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """

    def factor(step: int) -> float:
        if step >= max_iter:
            return end
        return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * step / max_iter))

    return factor


def multi_step(milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Return `gamma` to the power of the number of milestones reached.

    >>> [multi_step([2, 4], gamma=0.5)(step) for step in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """
    return lambda step: gamma ** bisect.bisect_right(milestones, step)


def every_step(step_size: int, gamma: float = 0.1, unit: float = 1) -> Schedule:
    """Return a schedule that multiplies by `gamma` after every `step_size` epochs of `unit`
    iterations; by default these are single iterations.

    >>> [every_step(2, gamma=0.5)(step) for step in (1, 2, 5)]
    [1.0, 0.5, 0.25]
    >>> [every_step(2, gamma=0.5, unit=1.5)(step) for step in (2, 3, 5, 6)]
    [1.0, 0.5, 0.5, 0.25]
    """
    return lambda step: gamma ** (epoch_at(step, unit) // step_size)


def polynomial(
    max_iter: int, power: float = 1.0, end: float = 0.0, cycle: bool = False
) -> Schedule:
    """Return a decay from 1 to `end` at `max_iter` as `(1 - step / max_iter) ** power`; `power=1`
    is linear.

    After `max_iter` the factor stays at `end`. With `cycle`, the horizon instead grows by
    `max_iter` each time it is passed.

    >>> [polynomial(4, end=0.5)(step) for step in (0, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.5]
    """

    def factor(step: int) -> float:
        horizon = max_iter
        if cycle:
            # unlike OneFlow's PolynomialLR, which treats iteration 0 as iteration 1 here, this
            # starts at exactly 1
            horizon = max_iter * max(1, math.ceil(step / max_iter))
        return end + (1.0 - end) * (1.0 - min(step, horizon) / horizon) ** power

    return factor


def with_warmup(
    schedule: Schedule, warmup_iter: int, warmup_factor: float, method: str = "linear"
) -> Schedule:
    """Return `schedule` with its first `warmup_iter` iterations replaced by a warm-up.

    The rest is not shifted.

    `"linear"` goes from `warmup_factor` to the value of `schedule` at `warmup_iter`, so the curve
    has no jump. `"constant"` stays at `warmup_factor`. This matches OneFlow's `WarmUpLR(...,
    warmup_prefix=False)`.

    >>> [with_warmup(constant(), 2, 0.5)(step) for step in (0, 1, 2)]
    [0.5, 0.75, 1.0]
    """
    if warmup_iter <= 0:
        return schedule
    goal = schedule(warmup_iter)

    def factor(step: int) -> float:
        if step >= warmup_iter:
            return schedule(step)
        if method == "constant":
            return warmup_factor
        return warmup_factor + (goal - warmup_factor) * step / warmup_iter

    return factor


def held_per_epoch(schedule: Schedule, iters_per_epoch: float) -> Schedule:
    """Return `schedule` updated only at the first iteration of each epoch.

    `iters_per_epoch` may be fractional.

    >>> [held_per_epoch(every_step(1, 0.5), 2)(step) for step in (0, 1, 2, 3)]
    [1.0, 1.0, 0.25, 0.25]
    >>> [held_per_epoch(lambda step: step, 2.5)(step) for step in (2, 3, 4, 5)]
    [0, 3, 3, 5]
    """

    def factor(step: int) -> float:
        return schedule(first_iter(epoch_at(step, iters_per_epoch), iters_per_epoch))

    return factor


def epoch_at(step: int, iters_per_epoch: float) -> int:
    """Return the epoch in which iteration `step` starts, as `trainer.epoch` does.

    >>> [epoch_at(step, 2.5) for step in (2, 3, 4, 5)]
    [0, 1, 1, 2]
    """
    # rounded, because 29 / 10 * 10 is not exactly 29
    return math.floor(round(step / iters_per_epoch, 6))


def first_iter(epochs: float, iters_per_epoch: float) -> int:
    """Return the first iteration that starts after `epochs` epochs.

    >>> first_iter(3, 2.9), first_iter(30, 1437 / 256)
    (9, 169)
    """
    return math.ceil(round(epochs * iters_per_epoch, 6))


def in_sequence(parts: Sequence[tuple[Schedule, int]]) -> Schedule:
    """Return a sequence of (schedule, length) parts as one schedule.

    Each part starts at its own iteration 0.

    The last part continues without limit.

    >>> [in_sequence([(constant(), 2), (every_step(1, 0.5), 3)])(step) for step in (1, 2, 3, 9)]
    [1.0, 1.0, 0.5, 0.0078125]
    """
    starts = [0, *itertools.accumulate(length for _, length in parts[:-1])]

    def factor(step: int) -> float:
        index = bisect.bisect_right(starts, step) - 1
        return parts[index][0](step - starts[index])

    return factor
