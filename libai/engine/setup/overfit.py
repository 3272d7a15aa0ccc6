"""Training on a few batches over and over (`train.overfit_batches`): a model that cannot learn these has a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class RepeatedBatches:
    """The first `count` micro-batches of `loader`, in their order and without an end; it is its own iterator.

    `samples_per_step`: samples of one micro-batch over all ranks. The state counts samples, as that of a train loader
    does.
    """

    def __init__(self, loader: Any, count: int, samples_per_step: int):
        self.samples_per_epoch = count * samples_per_step
        self._source: Iterator[Any] = iter(loader)
        self._count, self._samples_per_step = count, samples_per_step
        self._batches: list[Any] = []
        self._position = 0

    def __iter__(self) -> RepeatedBatches:
        return self

    def __next__(self) -> Any:
        index = self._position % self._count
        while len(self._batches) <= index:
            self._batches.append(next(self._source))
        self._position += 1
        return self._batches[index]

    def state_dict(self) -> dict[str, int]:
        """`{"consumed_samples": int}`, over all ranks."""
        return {"consumed_samples": self._position * self._samples_per_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue behind so many samples."""
        self._position = state["consumed_samples"] // self._samples_per_step
