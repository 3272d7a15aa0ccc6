"""Schedules of `torch.optim.lr_scheduler` that OneFlow 0.9.0 defines differently.

A trainer steps them after each update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneflow.optim import lr_scheduler

from libai.scheduler import FactorLR


class SequentialLR(lr_scheduler.SequentialLR):
    """A schedule continues with the step of the run instead of beginning at its milestone."""

    def __init__(self, optimizer: Any, schedulers: Sequence[Any], milestones: Sequence[int]):
        super().__init__(optimizer, schedulers, milestones, interval_rescaling=True)


class PolynomialLR(FactorLR):
    """The arguments have other names and defaults."""

    def __init__(self, optimizer: Any, total_iters: int = 5, power: float = 1.0):
        super().__init__(optimizer, lambda step: max(0.0, 1.0 - step / total_iters) ** power)
