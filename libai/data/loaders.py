"""The training loader, which is endless and can be resumed at any sample, and the finite evaluation loader.

Both produce the same samples for any number of ranks.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from libai.data.batches import BatchReader, Collate, as_batch
from libai.data.datasets import Batch
from libai.data.errors import DataError, checked_count
from libai.data.sampling import DataLayout, SampleRandom, SampleStream
from libai.utils.distributed import get_rank, get_world_size

Request = TypeVar("Request")
Result = TypeVar("Result")

# Handing a result from one thread to another takes 20-30 us (measured on 2 cores). Reading from memory or a memory map
# takes 2-10 us. So reads stay in the caller's thread until several in a row are slow. The time counted for a single
# read is limited: it may have been a cold start, or the scheduler may have given the core to another process.
_INLINE_SECONDS = 100e-6
_GRACE_SECONDS = 10e-3
_MAX_COUNTED_SECONDS = 3e-3

MAX_PREFETCH = 10_000


class ReadAhead(Generic[Request, Result], Iterator[Result]):
    """Iterate over `read(request)` for every request in order, and compute up to `depth` results ahead.

    Results are computed ahead in one background thread. It starts only when reading is slow enough to benefit from it.
    The results are the same either way. An exception in `read` is raised in place of its result and ends the iteration.
    Deleting the object ends the thread; `close()` also waits for it.
    """

    def __init__(self, read: Callable[[Request], Result], requests: Iterable[Request], depth: int):
        self._read = read
        self._requests = iter(requests)
        self._depth = depth
        self._pending: deque[Future[Result]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._spare_seconds = _GRACE_SECONDS

    def __next__(self) -> Result:
        if self._pool is None:
            return self._next_inline()
        try:
            self._submit(self._pool)
            if not self._pending:
                raise StopIteration
            return self._pending.popleft().result()
        except BaseException:
            # Also reached by a KeyboardInterrupt while waiting. Do not join: the read may take long.
            self._end(wait=False)
            raise

    def close(self) -> None:
        """Stop the background thread after its current read, and discard all results that were read ahead."""
        self._end(wait=True)

    def _end(self, wait: bool) -> None:
        self._requests = iter(())
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)
            self._pool = None

    def _next_inline(self) -> Result:
        request = next(self._requests)
        start = time.perf_counter()
        try:
            result = self._read(request)
        except BaseException:
            self._end(wait=False)
            raise
        self._spare_seconds += _INLINE_SECONDS - min(time.perf_counter() - start, _MAX_COUNTED_SECONDS)
        if self._spare_seconds > _GRACE_SECONDS:
            self._spare_seconds = _GRACE_SECONDS
        elif self._spare_seconds < 0 and self._depth > 0:
            self._pool = ThreadPoolExecutor(1, "libai-read-ahead")
            self._submit(self._pool, keep_for_caller=0)
        return result

    def _submit(self, pool: ThreadPoolExecutor, keep_for_caller: int = 1) -> None:
        """Keep `depth` reads in flight in addition to the one that the caller is about to take."""
        while len(self._pending) < self._depth + keep_for_caller:
            try:
                request = next(self._requests)
            except StopIteration:
                return
            self._pending.append(pool.submit(self._read, request))


class _StepReader:
    """Reads this rank's micro-batch of one step.

    It is separate from the loader, so the background thread keeps no reference to the loader.
    """

    def __init__(self, reader: BatchReader, layout: DataLayout, stream: SampleStream):
        self._reader = reader
        self._layout = layout
        self._stream = stream
        self._augment = getattr(reader.dataset, "augment_batch", None)

    def read(self, step_start: int) -> Batch:
        """Return this rank's micro-batch of the step that starts at stream position `step_start`."""
        start, stop = self._layout.slice_of_step(step_start)
        together = self._stream.indices(step_start, step_start + self._layout.samples_per_step)
        batch = self._reader.read(together[start - step_start : stop - step_start], together)
        if self._augment is not None:
            augmented = self._augment(batch, SampleRandom(self._stream.seed, np.arange(start, stop)))
            batch = as_batch(self._reader.dataset, augmented, stop - start)
        return batch


class TrainLoader:
    """Endless iterator of this rank's micro-batches of a dataset. `iter(loader)` returns the loader itself.

    All ranks split one sample stream (see `SampleStream`): micro-step t takes the next
    `num_data_ranks * micro_batch_size` positions, rank r the r-th slice. No samples are dropped at the end of an epoch:
    a micro-batch may span two epochs, or more if it is larger than the dataset. A dataset with
    `augment_batch(batch, random)` gets a `SampleRandom` that depends on the stream positions, so augmentation is also
    resumed exactly.

    After an exception the position is still after the last returned micro-batch, so the next call repeats the failed
    read.
    """

    def __init__(
        self,
        dataset: Any,
        layout: DataLayout,
        *,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
        **reading: Any,
    ):
        reader = BatchReader(dataset, **reading)
        self.dataset = reader.dataset
        self.layout = layout
        self.collate = reading.get("collate")
        self._stream = SampleStream(len(self.dataset), seed=seed, shuffle=shuffle)
        self._steps = _StepReader(reader, layout, self._stream)
        self._prefetch = checked_count("prefetch", prefetch, MAX_PREFETCH, "read when asked")
        self._consumed_samples = 0
        self._ahead: ReadAhead[int, Batch] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one epoch over all ranks, which is the length of the dataset."""
        return self._stream.num_samples

    @property
    def consumed_samples(self) -> int:
        """Number of samples returned on all ranks so far. Samples that were only read ahead do not count."""
        return self._consumed_samples

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            starts = itertools.count(self._consumed_samples, self.layout.samples_per_step)
            self._ahead = ReadAhead(self._steps.read, starts, self._prefetch)
        try:
            batch = next(self._ahead)
        except BaseException:
            self._ahead = None
            raise
        self._consumed_samples += self.layout.samples_per_step
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return `{"consumed_samples": int}`, counted over all ranks.

        This is the whole state, and it is valid for any number of ranks.
        """
        return {"consumed_samples": self._consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the stream after `state["consumed_samples"]` samples, and discard what was read ahead.

        Raises `DataError` if the state has no such count.
        """
        consumed = state.get("consumed_samples")
        if type(consumed) is not int or consumed < 0:
            raise DataError(
                f"a loader state needs 'consumed_samples', a whole number of samples >= 0, and {state} was found: "
                "give what state_dict() of a train loader returned."
            )
        self.close()
        self._consumed_samples = consumed

    def indices_before(self, state: dict[str, int], num_batches: int) -> list[np.ndarray]:
        """Return the dataset indices in the last `num_batches` micro-batches of this rank before the position `state`.

        Each array is int64 `(micro_batch_size,)`.
        """
        step, end = self.layout.samples_per_step, state["consumed_samples"]
        starts = range(end - num_batches * step, end, step)
        return [self._stream.indices(*self.layout.slice_of_step(start)) for start in starts]

    def close(self) -> None:
        """Stop the background thread and discard what it read ahead. Iterating again starts a new thread."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def build_train_loader(
    dataset: Any,
    *,
    micro_batch_size: int,
    data_rank: int | None = None,
    num_data_ranks: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    num_workers: int = 0,
    collate: Collate | None = None,
    prefetch: int = 2,
) -> TrainLoader:
    """Build an endless, exactly resumable loader of one rank's micro-batches.

    Args:
        dataset: an object with `len(ds)` and `ds[i] -> dict` or `get_batch(indices)`, or a dict of arrays with equal
            length.
        data_rank, num_data_ranks: select the part of every global batch that this process reads. By default every
            process of the job reads its own part. Tensor-parallel and pipeline-parallel ranks share their data: pass
            `mesh.data_rank` and `mesh.data` there.
        prefetch: number of micro-batches to read ahead in one background thread, which starts only if reading is slow.
        num_workers: number of threads that read one micro-batch together, for datasets with slow samples.
        collate: function that builds the batch from a list of samples, see `BatchReader`.

    Raises `DataError` for an empty dataset or impossible numbers.
    """
    return TrainLoader(
        dataset,
        DataLayout(micro_batch_size, *_ranks(data_rank, num_data_ranks)),
        seed=seed,
        shuffle=shuffle,
        prefetch=prefetch,
        num_workers=num_workers,
        collate=collate,
    )


def _ranks(data_rank: int | None, num_data_ranks: int | None) -> tuple[int, int]:
    """Return both arguments if given, else this process's rank and the number of processes."""
    if (data_rank is None) != (num_data_ranks is None):
        raise DataError(
            f"data_rank={data_rank} and num_data_ranks={num_data_ranks}: give both, or neither to take this process's "
            "rank and the number of processes."
        )
    if data_rank is None or num_data_ranks is None:
        return get_rank(), get_world_size()
    return data_rank, num_data_ranks


class EvalLoader:
    """Evaluation loader with a length. Each iteration yields `(batch, replicated)` over the dataset in order.

    Full global batches are split evenly across the ranks (`replicated=False`: every rank has different samples). The
    remaining samples go to *every* rank, in chunks of at most `micro_batch_size` samples (`replicated=True`: all ranks
    have the same samples, which must be counted once). `len()` and the flags are the same on all ranks, so collectives
    stay in step.
    """

    def __init__(
        self,
        dataset: Any,
        layout: DataLayout,
        *,
        max_batches: int | None = None,
        prefetch: int = 2,
        **reading: Any,
    ):
        if max_batches is not None and max_batches < 1:
            raise DataError(f"max_batches={max_batches}: evaluate at least one batch, or null for all of them.")
        self._reader = BatchReader(dataset, **reading)
        self.dataset = self._reader.dataset
        self.layout = layout
        self._prefetch = checked_count("prefetch", prefetch, MAX_PREFETCH, "read when asked")
        self._slices = self._cut(len(self.dataset))[:max_batches]

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        return ReadAhead(self._read_slice, self._slices, self._prefetch)

    def _read_slice(self, slice_: tuple[int, int, bool]) -> tuple[Batch, bool]:
        start, stop, replicated = slice_
        first = start if replicated else start - start % self.layout.samples_per_step
        together = np.arange(first, stop if replicated else first + self.layout.samples_per_step)
        return self._reader.read(np.arange(start, stop), together), replicated

    def _cut(self, num_samples: int) -> list[tuple[int, int, bool]]:
        """Return `(start, stop, replicated)` of every batch for this rank."""
        step, micro = self.layout.samples_per_step, self.layout.micro_batch_size
        num_full = num_samples // step
        full = [(*self.layout.slice_of_step(k * step), False) for k in range(num_full)]
        rest = [(start, min(start + micro, num_samples), True) for start in range(num_full * step, num_samples, micro)]
        return full + rest


def build_eval_loader(
    dataset: Any,
    *,
    micro_batch_size: int,
    data_rank: int | None = None,
    num_data_ranks: int | None = None,
    max_batches: int | None = None,
    num_workers: int = 0,
    collate: Collate | None = None,
    prefetch: int = 2,
) -> EvalLoader:
    """Build an evaluation loader of `(batch, replicated)` pairs, see `EvalLoader`.

    `max_batches` keeps only the first batches, each of `micro_batch_size` samples per rank. The other arguments are the
    same as for `build_train_loader`. Raises `DataError` for an empty dataset or impossible numbers.
    """
    layout = DataLayout(micro_batch_size, *_ranks(data_rank, num_data_ranks))
    reading = {"num_workers": num_workers, "collate": collate}
    return EvalLoader(dataset, layout, max_batches=max_batches, prefetch=prefetch, **reading)
