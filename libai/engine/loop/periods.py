"""How often something happens: every so many iterations, or once in every pass over the training data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EveryEpoch:
    """Due after the iteration in which a pass over the data ends; an iteration may hold the end of one and the
    beginning of the next."""

    samples_per_epoch: int
    samples_per_iter: int

    def ends(self, completed: int) -> bool:
        """Whether a pass ended in the last of `completed` iterations."""
        seen = completed * self.samples_per_iter
        return seen // self.samples_per_epoch > (seen - self.samples_per_iter) // self.samples_per_epoch

    def begins(self, iteration: int) -> bool:
        """Whether a pass begins in the 0-based `iteration`, with its first sample or a later one."""
        first = iteration * self.samples_per_iter
        return -first % self.samples_per_epoch < self.samples_per_iter


#: a number of iterations (0: never), or every epoch
Period = int | EveryEpoch


def is_due(period: Period, completed: int) -> bool:
    """Whether something with this period is due once `completed` iterations are made."""
    if isinstance(period, int):
        return period > 0 and completed % period == 0
    return period.ends(completed)
