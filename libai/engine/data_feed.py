"""Micro-batches of the training loop: reading, looking ahead, and the data position saved in a
checkpoint.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any, TypeAlias

import numpy as np

from libai.engine.check_parts import check_part, describe_bad_input
from libai.engine.hook_base import EveryEpoch
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.seeding import generators_kept

#: batches of this rank, or a function that returns them and is called at the first read
LoaderOrBuilder: TypeAlias = "Iterable[Any] | Callable[[], Iterable[Any]]"


class DataFeed:
    """Returns the micro-batches of one iteration after another and restarts a finite loader when it
    ends.

    Args:
        source: an iterable of micro-batches of this rank, or a function that returns such an
            iterable. It is opened at the first read. None: a training step of the user's own reads
            its data itself.
        num_micro_batches: micro-batches per iteration.

    Attributes:
        seconds: total time in seconds that calls of `take` have spent reading.
        items_per_iter: tokens per iteration over all ranks, known from the first iteration on. None
            if the model counts only samples.
        batches: the micro-batches of the latest `take`, copies of what the loader returned.
        is_ahead: true from the first read of an iteration until the trainer resets it after the
            update. In between, the data position is ahead of the weights, so they must not be saved
            together.
    """

    def __init__(self, source: LoaderOrBuilder | None, num_micro_batches: int = 1):
        self.seconds = 0.0
        self.items_per_iter: int | None = None
        self.is_ahead = False
        self.batches: list[Any] = []
        self._num_micro_batches = num_micro_batches
        self.reset(source)

    def reset(self, source: LoaderOrBuilder | None) -> None:
        """See `TrainerBase.reset_data_loader`."""
        self._builder = source if callable(source) else None
        self._loader: Any = None if self._builder else source
        self._iterator: Iterator[Any] | None = None
        #: micro-batches that were read but not taken yet, and the loader's position before them
        self._ahead: list[Any] = []
        self._position_before: Mapping[str, Any] | None = None

    @property
    def loader(self) -> Any:
        """The loader. If a function was given, the function is called at first use."""
        if self._loader is None and self._builder is not None:
            self._loader = self._builder()
        return self._loader

    @property
    def is_even(self) -> bool:
        """True if every rank is known to get the same number of samples: the loader is libai's, or
        returns the same batches on all ranks.
        """
        return hasattr(self.loader, "layout") or getattr(self.loader, "is_replicated", False)

    @property
    def epoch(self) -> EveryEpoch | None:
        """The iterations in which a pass over the loader ends; None if its length is unknown.

        Counted in samples for a loader of libai, and otherwise in micro-batches.
        """
        loader, steps = self.loader, self._num_micro_batches
        layout = getattr(loader, "layout", None)
        samples = getattr(loader, "samples_per_epoch", None)
        if layout is not None and samples:
            return EveryEpoch(samples, steps * layout.samples_per_step)
        # the __len__ of some loaders only raises TypeError
        length = length_hint(loader, 0) if hasattr(loader, "__len__") else 0
        return EveryEpoch(length, steps) if length else None

    def take(self) -> list[Any]:
        """Return the micro-batches of the next iteration."""
        start = time.perf_counter()
        micro_batches = []
        for _ in range(self._num_micro_batches):
            micro_batches.append(self._ahead.pop(0) if self._ahead else self._next())
            self.is_ahead = True
        self.seconds += time.perf_counter() - start
        self.batches = micro_batches
        return micro_batches

    def warn_of_bad_inputs(self, iteration: int) -> None:
        """Log the first input of `batches`, of an iteration, that is not finite: once per input."""
        for number, batch in enumerate(self.batches):
            found = describe_bad_input(batch)
            if found is not None:
                if hasattr(self.loader, "indices_before"):
                    found = describe_bad_input(batch, self.sample_indices()[number])
                text = (
                    f"iteration {iteration}: {found}. Unless the model replaces such values, this "
                    "loss or the next one is not finite: correct the data."
                )
                warn_once(logger, str(found).partition("[")[0], text)

    def give_back(self, position: Any) -> None:
        """Make the next `take` return the micro-batches of the last one again.

        `position`: the position before it.
        """
        self.is_ahead = False
        if position is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(position)
            self._iterator = None
        else:
            self._ahead = self.batches + self._ahead
            self._position_before = position

    def sample_indices(self) -> list[np.ndarray]:
        """Return the dataset indices of the samples in `batches`: one `(samples,)` int64 array per
        micro-batch.

        Covers the micro-batches of this rank. Raises `UserError` if the loader does not support
        this.
        """
        position = self.position()
        if position is None or not hasattr(self.loader, "indices_before"):
            raise UserError(
                f"{type(self.loader).__name__} does not provide the indices of its samples. Use "
                "libai.data.build_train_loader, or add a method indices_before(position, "
                "num_batches) to the loader."
            )
        return self.loader.indices_before(position, len(self.batches))

    def peek(self) -> list[Any]:
        """Return the micro-batches of the next iteration without consuming them.

        A checkpoint counts them as unread.
        """
        return self.read_ahead(1)[0]

    def read_ahead(self, num_iters: int) -> list[list[Any]]:
        """Return what `look_ahead` yields, as a list: the micro-batches of each of the next
        `num_iters` iterations.
        """
        return [*self.look_ahead(num_iters)]

    def look_ahead(self, num_iters: int) -> Iterator[list[Any]]:
        """Yield the micro-batches of the next `num_iters` iterations, one iteration at a time,
        without consuming them.

        A loader that can save its position is moved back to it at the end, and the random states of
        Python and NumPy are restored too. For any other loader the batches are kept and returned
        again later.
        """
        steps = self._num_micro_batches
        position = self.position()
        if position is not None and hasattr(self.loader, "load_state_dict"):
            with generators_kept():
                try:
                    for _ in range(num_iters):
                        yield [self._next() for _ in range(steps)]
                finally:  # also if the caller stops early
                    self.loader.load_state_dict(position)
                    self._iterator = None
        else:
            self._position_before = position
            for first in range(0, num_iters * steps, steps):
                while len(self._ahead) < first + steps:
                    self._ahead.append(self._next())
                yield self._ahead[first : first + steps]

    def position(self) -> Any:
        """Return the loader's JSON-serializable position for the next iteration, or None if it has
        no position.
        """
        if self._ahead:
            return self._position_before
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None

    def go_to(self, position: Mapping[str, Any] | None, iteration: int) -> None:
        """Continue from `position`. An empty position leaves the loader where it is.

        If the loader cannot restore a position, batches are read and dropped up to `iteration`,
        with a warning.
        """
        self._iterator = None
        self._ahead = []
        if self.loader is None or (position is not None and not position):
            return
        if hasattr(self.loader, "load_state_dict") and position is not None:
            self.loader.load_state_dict(position)
        elif iteration:
            count = iteration * self._num_micro_batches
            logger.warning(
                "%s has no state_dict/load_state_dict: reading and dropping %d micro-batches to "
                "reach iteration %d",
                type(self.loader).__name__,
                count,
                iteration,
            )
            for _ in range(count):
                self._next()

    def _next(self) -> Any:
        """Return the next micro-batch; restart the loader when it ends."""
        for _ in range(2):
            if self._iterator is None:
                check_part("loader", self.loader, "the training data loader (dataloader.train)")
                self._iterator = iter(self.loader)
            try:
                # a loader may use its memory again, and a forward may change its inputs in place
                return copy.deepcopy(next(self._iterator))
            except StopIteration:
                self._iterator = None
        raise UserError(
            f"the training data loader ({type(self.loader).__name__}) returned no batch: the "
            "dataset is empty, smaller than one micro-batch, or a generator that can be read only "
            "once. Pass an iterable that can be read again."
        )


def num_bytes(batch: Any) -> int:
    """Return the size in bytes of the arrays and tensors at the top level of a batch.

    Every tensor element counts as 8 bytes.
    """
    if isinstance(
        batch, (dict, Mapping)
    ):  # dict first, because a check of Mapping alone runs Python code
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        batch = [batch]
    total = 0
    for value in batch:  # a loop, not a generator: this runs in every iteration
        total += (
            value.nbytes if isinstance(value, np.ndarray) else 8 * getattr(value, "numel", int)()
        )
    return total
