"""All batch and length arithmetic of a run, done once and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from libai.config import BatchSizes
from libai.engine.hook_base import EveryEpoch, Period
from libai.utils.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of the batches and length of a run.

    micro_batch_size: samples of one rank in one forward pass. num_accumulation_steps: micro-batches per iteration.
    data_parallel_size: ranks that read different data. global_batch_size: their product, samples per iteration.
    train_iter: iterations of the run. warmup_iter: those in which the rate rises.
    samples_per_epoch: of the training set, when it is known.
    """

    micro_batch_size: int
    num_accumulation_steps: int
    data_parallel_size: int
    global_batch_size: int
    train_iter: int
    warmup_iter: int
    samples_per_epoch: int | None = None

    @classmethod
    def of(cls, train: Any, sizes: BatchSizes, data_parallel_size: int, loader: Any) -> BatchPlan:
        """The plan of a run by the section `train` of its config.

        `train_epoch > 0` sets the length, rounded up. Raises `UserError` for a loader without `samples_per_epoch` then.
        """
        samples = getattr(loader, "samples_per_epoch", None)
        train_iter = train.train_iter
        if train.train_epoch > 0:
            if not samples:
                raise UserError(
                    f"train.train_epoch={train.train_epoch} needs to know how many samples an epoch has, and the "
                    "training loader has no samples_per_epoch. Set train.train_iter instead."
                )
            train_iter = math.ceil(train.train_epoch * samples / sizes.global_)
        return cls(
            micro_batch_size=sizes.micro,
            num_accumulation_steps=sizes.accumulation,
            data_parallel_size=data_parallel_size,
            global_batch_size=sizes.global_,
            train_iter=train_iter,
            warmup_iter=round(train_iter * train.warmup_ratio),
            samples_per_epoch=samples,
        )

    @property
    def iters_per_epoch(self) -> float | None:
        """Iterations in one pass over the training set, not rounded; None when its size is unknown."""
        return self.samples_per_epoch / self.global_batch_size if self.samples_per_epoch else None

    @property
    def epoch(self) -> EveryEpoch | None:
        """The iterations in which a pass ends; None when the size of the training set is unknown."""
        return EveryEpoch(self.samples_per_epoch, self.global_batch_size) if self.samples_per_epoch else None

    def period(self, value: int | Literal["epoch"], setting: str) -> Period:
        """The period that `setting` asks for: a number of iterations, or "epoch"."""
        if isinstance(value, int):
            return value
        if self.epoch is None:
            raise UserError(
                f"{setting}=epoch needs to know how many samples an epoch has, and the training loader has no "
                "samples_per_epoch. Give a number of iterations, or a loader that has it."
            )
        return self.epoch

    def describe(self) -> str:
        """`64 samples = 8 micro-batch x 2 data ranks x 4 accumulation`."""
        ranks = f"{self.data_parallel_size} data rank{'s' if self.data_parallel_size > 1 else ''}"
        return (
            f"{self.global_batch_size} samples = {self.micro_batch_size} micro-batch x {ranks} x "
            f"{self.num_accumulation_steps} accumulation"
        )
