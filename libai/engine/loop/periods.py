"""How often something happens: every so many iterations, or once in every pass over the training data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EveryEpoch:
    """Due after the iteration in which a pass over the data ends; an iteration may hold the end of one and the
    beginning of the next."""

    samples_per_epoch: int
    samples_per_iter: int


#: a number of iterations (0: never), or every epoch
Period = int | EveryEpoch


def is_due(period: Period, completed: int) -> bool:
    """Whether something with this period is due once `completed` iterations are made."""
    if isinstance(period, int):
        return period > 0 and completed % period == 0
    seen = completed * period.samples_per_iter
    return seen // period.samples_per_epoch > (seen - period.samples_per_iter) // period.samples_per_epoch
