"""Compute all batch sizes and lengths of a run once, and freeze them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from libai.config import BatchSizes
from libai.config.settings.schema import Train
from libai.engine.hook_base import EveryEpoch, Period
from libai.utils.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes and length of a run.

    micro_batch_size: samples of one rank in one forward pass. num_accumulation_steps: micro-batches
    per iteration. data_parallel_size: number of ranks that read different data. global_batch_size:
    the product of these three, samples per iteration. train_iter: iterations of the run.
    warmup_iter: iterations in which the learning rate rises. samples_per_epoch: samples in the
    training set, or None if unknown. first_sample: see `EveryEpoch`; not 0 if an earlier session
    had batches of another size.
    """

    micro_batch_size: int
    num_accumulation_steps: int
    data_parallel_size: int
    global_batch_size: int
    train_iter: int
    warmup_iter: int
    samples_per_epoch: int | None = None
    first_sample: int = 0

    @classmethod
    def of(
        cls,
        train: Train,
        sizes: BatchSizes,
        data_parallel_size: int,
        loader: Any,
        resumed: tuple[int, int] = (0, 0),
    ) -> BatchPlan:
        """Return the batch plan of a run with the config section `train`.

        `train_epoch > 0` sets the length, rounded up. `resumed`: iterations and samples of earlier
        sessions. Raises `UserError` if it is set and the
        loader has no `samples_per_epoch`.
        """
        samples = getattr(loader, "samples_per_epoch", None)
        train_iter = train.train_iter
        first_sample = resumed[1] - resumed[0] * sizes.global_
        if train.train_epoch > 0:
            if not samples:
                raise UserError(
                    f"train.train_epoch={train.train_epoch} requires the number of samples per "
                    "epoch, but the training loader has no samples_per_epoch. Set "
                    "train.train_iter instead."
                )
            train_iter = math.ceil((train.train_epoch * samples - first_sample) / sizes.global_)
        return cls(
            micro_batch_size=sizes.micro,
            num_accumulation_steps=sizes.accumulation,
            data_parallel_size=data_parallel_size,
            global_batch_size=sizes.global_,
            train_iter=train_iter,
            warmup_iter=round(train_iter * train.warmup_ratio),
            samples_per_epoch=samples,
            first_sample=first_sample,
        )

    @property
    def iters_per_epoch(self) -> float | None:
        """Iterations in one pass over the training set, not rounded; None if its size is
        unknown.
        """
        return self.samples_per_epoch / self.global_batch_size if self.samples_per_epoch else None

    @property
    def epoch(self) -> EveryEpoch | None:
        """The iterations in which a pass ends; None if the size of the training set is unknown."""
        return (
            EveryEpoch(self.samples_per_epoch, self.global_batch_size, self.first_sample)
            if self.samples_per_epoch
            else None
        )

    def period(self, value: int | Literal["epoch"], setting: str) -> Period:
        """Return `value`, a number of iterations or "epoch", as a period.

        `setting`: its name in the config, for the error. Raises `UserError` for "epoch" if the size
        of the training set is unknown.
        """
        if isinstance(value, int):
            return value
        if self.epoch is None:
            raise UserError(
                f"{setting}=epoch requires the number of samples per epoch, but the training "
                "loader has no samples_per_epoch. Set a number of iterations, or add the "
                "attribute to the loader."
            )
        return self.epoch

    def describe(self) -> str:
        """Return a text such as `64 samples = 8 micro-batch x 2 data ranks x 4 accumulation`."""
        ranks = f"{self.data_parallel_size} data rank{'s' if self.data_parallel_size > 1 else ''}"
        return (
            f"{self.global_batch_size} samples = {self.micro_batch_size} micro-batch x {ranks} x "
            f"{self.num_accumulation_steps} accumulation"
        )
