"""Micro-batches of the training loop: reading, looking ahead, and the position that a checkpoint holds."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")


class DataFeed:
    """Gives the micro-batches of one iteration after the other; a finite loader is started again when it ends.

    Args:
        source: an iterable of micro-batches of this rank, or a function that returns one; opened at the first read.
        num_micro_batches: of an iteration.

    Attributes:
        seconds: how long the latest `take` waited.
        items_per_iter: tokens per iteration over all ranks, known from the first iteration on; None where there are
            only samples.
        batches: the micro-batches of the latest `take`, as the loader gave them.
        is_ahead: true from the first read for an iteration until the trainer sets it back after the update; weights
            and position do not belong together then.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]], num_micro_batches: int = 1):
        self.seconds = 0.0
        self.items_per_iter: int | None = None
        self.is_ahead = False
        self.batches: list[Any] = []
        self._num_micro_batches = num_micro_batches
        self._reset(source)

    def _reset(self, source: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        """See `TrainerBase.reset_data_loader`."""
        self._builder = source if callable(source) else None
        self._loader: Any = None if self._builder else source
        self._iterator: Iterator[Any] | None = None
        #: micro-batches that were read and not taken, and the position before them
        self._ahead: list[Any] = []
        self._position_before: Mapping[str, Any] | None = None

    @property
    def loader(self) -> Any:
        """Return the loader, which is built at first use if a function was given."""
        if self._loader is None and self._builder is not None:
            self._loader = self._builder()
        return self._loader

    def take(self) -> list[Any]:
        """Return the micro-batches of the next iteration."""
        start = time.perf_counter()
        micro_batches: list[Any] = []
        while len(micro_batches) < self._num_micro_batches:
            micro_batches.append(self._ahead.pop(0) if self._ahead else self._next())
            self.is_ahead = True
        self.seconds = time.perf_counter() - start
        self.batches = micro_batches
        return micro_batches

    def sample_indices(self) -> list[np.ndarray]:
        """Return the samples of the dataset that are in `batches`: for each micro-batch of this rank their indices,
        `(samples,)` int64. Raises `UserError` for a loader that cannot say."""
        position = self.position()
        if position is None or not hasattr(self.loader, "indices_before"):
            raise UserError(
                f"{type(self.loader).__name__} does not say which samples its batches hold. Use "
                "libai.data.build_train_loader, or give the loader indices_before(position, num_batches)."
            )
        return self.loader.indices_before(position, len(self.batches))

    def peek(self) -> list[Any]:
        """Return the micro-batches of the next iteration, which will still get them. A checkpoint counts them as
        unread."""
        if not self._ahead:
            self._position_before = self._position_of_loader()
        while len(self._ahead) < self._num_micro_batches:
            self._ahead.append(self._next())
        return self._ahead[: self._num_micro_batches]

    def read_ahead(self, num_iters: int) -> list[list[Any]]:
        """Return the micro-batches of the next `num_iters` iterations, which will still get them.

        A loader with a position goes back to it, and the random numbers of Python and NumPy with it; what any other
        loader gave is kept.
        """
        steps = self._num_micro_batches
        generators = (random.getstate(), np.random.get_state())
        position = self._position_of_loader()
        read = [*self._ahead]
        while len(read) < num_iters * steps:
            read.append(self._next())
        if position is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(position)
            self._iterator = None
            random.setstate(generators[0])
            np.random.set_state(generators[1])
        else:
            self._ahead = [*read]
            self._position_before = position
        return [read[i : i + steps] for i in range(0, num_iters * steps, steps)]

    def position(self) -> Any:
        """Return the position of the next iteration in the loader, JSON-able; None for a loader without one."""
        return self._position_before if self._ahead else self._position_of_loader()

    def go_to(self, position: Mapping[str, Any] | None, iteration: int) -> None:
        """Continue from `position`; an empty one leaves the loader where it is.

        A loader that cannot take a position is read until `iteration`, with a warning.
        """
        self._iterator = None
        self._ahead = []
        if position is not None and not position:
            return
        if hasattr(self.loader, "load_state_dict") and position is not None:
            self.loader.load_state_dict(position)
        elif iteration:
            count = iteration * self._num_micro_batches
            if is_main_process():
                logger.warning(
                    "%s has no state_dict/load_state_dict: reading and dropping %d micro-batches to reach iteration %d",
                    type(self.loader).__name__,
                    count,
                    iteration,
                )
            for _ in range(count):
                self._next()

    def _position_of_loader(self) -> Any:
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None

    def _open(self) -> Iterator[Any]:
        try:
            return iter(self.loader)
        except TypeError:
            if isinstance(self.loader, Iterable):
                raise
            found = "None" if self.loader is None else f"a {type(self.loader).__name__}"
            raise UserError(
                f"training needs an iterable of micro-batches and the data loader is {found}. Set dataloader.train in "
                "the config, or give the trainer a loader (or a function that returns one)."
            ) from None

    def _next(self) -> Any:
        """Read from the loader, which is started again at its end."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._open()
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise UserError(
            f"the training data loader ({type(self.loader).__name__}) gave no batch: the dataset is empty, smaller "
            "than one micro-batch, or a generator that can be read only once. Give an iterable that can be started "
            "again."
        )


def num_bytes(batch: Any) -> int:
    """Return the bytes of the arrays and tensors at the top level of a batch."""
    values: Iterable[Any]
    if type(batch) is dict or isinstance(batch, Mapping):  # asking for Mapping runs Python code
        values = batch.values()
    else:
        values = batch if isinstance(batch, (list, tuple)) else [batch]
    total = 0
    for value in values:  # it runs in every iteration: no generator
        total += value.nbytes if isinstance(value, np.ndarray) else 8 * getattr(value, "numel", int)()
    return total
