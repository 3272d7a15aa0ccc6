"""The finite loader of evaluation batches, in which every sample counts exactly once for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from libai.data.batches import Batch, BatchReader
from libai.data.errors import DataError
from libai.data.read_ahead import ReadAhead, checked_prefetch
from libai.data.sampling import DataLayout


class EvalLoader:
    """Sized and re-iterable; yields `(batch, replicated)` over the dataset in order.

    Full global batches are cut over the ranks in equal shapes (`replicated=False`: every rank holds other samples).
    What remains goes to *every* rank, in chunks of at most `micro_batch_size` samples (`replicated=True`: all ranks
    hold the same ones, to be counted once). `len()` and the flags are the same on all ranks, so collectives stay in
    step.
    """

    def __init__(
        self,
        dataset: Any,
        layout: DataLayout,
        *,
        max_batches: int | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
    ):
        if max_batches is not None and max_batches < 1:
            raise DataError(f"max_batches={max_batches}: evaluate at least one batch, or null for all of them.")
        self._reader = BatchReader(dataset, num_workers)
        self.dataset = self._reader.dataset
        self.layout = layout
        self._prefetch = checked_prefetch(prefetch)
        self._slices = self._cut(len(self.dataset))[:max_batches]

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        return ReadAhead(self._read_slice, self._slices, self._prefetch)

    def _read_slice(self, slice_: tuple[int, int, bool]) -> tuple[Batch, bool]:
        start, stop, replicated = slice_
        return self._reader.read(np.arange(start, stop)), replicated

    def _cut(self, num_samples: int) -> list[tuple[int, int, bool]]:
        """This rank's `(start, stop, replicated)` of every batch."""
        step, micro = self.layout.samples_per_step, self.layout.micro_batch_size
        num_full = num_samples // step
        full = [(*self.layout.slice_of_step(k * step), False) for k in range(num_full)]
        rest = [(start, min(start + micro, num_samples), True) for start in range(num_full * step, num_samples, micro)]
        return full + rest


def build_eval_loader(
    dataset: Any,
    *,
    micro_batch_size: int,
    data_rank: int = 0,
    num_data_ranks: int = 1,
    max_batches: int | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
) -> EvalLoader:
    """A sized, re-iterable loader of `(batch, replicated)`, see `EvalLoader`.

    `max_batches` keeps the first batches only (each of `micro_batch_size` samples per rank). The other arguments are
    those of `build_train_loader`. Raises `DataError` for an empty dataset or impossible numbers.
    """
    layout = DataLayout(micro_batch_size, data_rank, num_data_ranks)
    return EvalLoader(dataset, layout, max_batches=max_batches, num_workers=num_workers, prefetch=prefetch)
