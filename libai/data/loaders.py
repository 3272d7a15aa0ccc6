"""The training loader, which is endless and can be resumed at any sample, and the finite evaluation
loader.

Both produce the same samples for any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import numpy as np

from libai.data.batches import BatchReader, Collate, as_batch
from libai.data.datasets import Batch
from libai.data.errors import DataError
from libai.data.random_state import Seeds, keys_of
from libai.data.reading import RepeatableReading
from libai.data.sampling import DataLayout, SampleRandom, SampleStream
from libai.utils.distributed import get_rank, get_world_size
from libai.utils.sizes import check_range, check_sizes

#: allowed numbers of micro-batches to read ahead; with 0, they are read when needed
_PREFETCH = "0 <= x <= 10000"


def _read_step(
    reader: BatchReader,
    layout: DataLayout,
    stream: SampleStream,
    step_start: int,
    seeds: Seeds | None,
) -> Batch:
    """Return this rank's micro-batch of the step that starts at a stream position."""
    start, stop = layout.slice_of_step(step_start)
    together = stream.indices(step_start, step_start + layout.samples_per_step)
    own = together[start - step_start : stop - step_start]
    batch = reader.read(own, together, seeds)
    dataset = reader.dataset
    if hasattr(dataset, "augment_batch"):
        if seeds is not None:
            seeds.for_batch()
        augmented = dataset.augment_batch(batch, SampleRandom(stream.seed, np.arange(start, stop)))
        if augmented is not batch:
            batch = as_batch(type(dataset).__name__, augmented, stop - start)
    return batch


def _keys_of_step(layout: DataLayout, stream: SampleStream, step_start: int) -> np.ndarray:
    """Return a key for each sample: it depends on the seed, the epoch and the index."""
    start, stop = layout.slice_of_step(step_start)
    epochs = np.arange(start, stop) // stream.num_samples
    return keys_of(stream.seed, epochs, stream.indices(start, stop))


class TrainLoader:
    """Endless iterator of this rank's micro-batches of a dataset.

    `iter(loader)` returns the loader itself.

    All ranks split one sample stream (see `SampleStream`): micro-step t takes the next
    `num_data_ranks * micro_batch_size` positions, rank r the r-th slice. No samples are dropped at
    the end of an epoch: a micro-batch may span two epochs, or more if it is larger than the
    dataset. A dataset with `augment_batch(batch, random)` gets a `SampleRandom` that depends on the
    stream positions, so augmentation is also resumed exactly.

    After an exception the position is still after the last returned micro-batch, so the next call
    repeats the failed read.
    """

    def __init__(
        self,
        reader: BatchReader,
        layout: DataLayout,
        *,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
    ):
        self.dataset = reader.dataset
        self.collate = reader.collate
        self.layout = layout
        self._reader = reader
        self._stream = SampleStream(len(self.dataset), seed=seed, shuffle=shuffle)
        # no methods of this loader, because the background thread must not keep a reference to it
        self._reading = RepeatableReading(
            type(self.dataset).__name__,
            partial(_read_step, reader, layout, self._stream),
            partial(_keys_of_step, layout, self._stream),
        )
        check_range(_PREFETCH, DataError, prefetch=prefetch)
        self._prefetch = prefetch
        self._consumed_samples = 0
        self._ahead: Generator[Batch, None, None] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one epoch over all ranks, which is the length of the dataset."""
        return self._stream.num_samples

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            first, step = self._consumed_samples, self.layout.samples_per_step
            self._ahead = self._reading.batches(
                lambda number: itertools.count(first + number * step, step), self._prefetch
            )
        try:
            batch = next(self._ahead)
        except BaseException:
            self._ahead = None
            raise
        self._consumed_samples += self.layout.samples_per_step
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return `{"consumed_samples": int}`: the samples returned on all ranks, without those only
        read ahead.

        This is the whole state, and it is valid for any number of ranks.
        """
        return {"consumed_samples": self._consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the stream after `state["consumed_samples"]` samples, and discard what was read
        ahead.

        Raises `DataError` if the state has no such count.
        """
        consumed = state.get("consumed_samples")
        if type(consumed) is not int or consumed < 0:
            raise DataError(
                "a loader state needs 'consumed_samples', a whole number of samples >= 0, but it "
                f"is {state}: pass the result of a train loader's state_dict()."
            )
        self.close()
        self._consumed_samples = consumed

    def indices_before(self, state: dict[str, int], num_batches: int) -> list[np.ndarray]:
        """Return the dataset indices in the last `num_batches` micro-batches of this rank before
        the position `state`.

        Each array is int64 `(micro_batch_size,)`.
        """
        step, end = self.layout.samples_per_step, state["consumed_samples"]
        starts = range(end - num_batches * step, end, step)
        return [self._stream.indices(*self.layout.slice_of_step(start)) for start in starts]

    def of_all_ranks(self) -> TrainLoader:
        """Return a loader at the same position that reads the micro-batches of all ranks as one."""
        stream = self._stream
        layout = DataLayout(self.layout.samples_per_step)
        whole = TrainLoader(
            self._reader, layout, seed=stream.seed, shuffle=stream.shuffle, prefetch=0
        )
        whole.load_state_dict(self.state_dict())
        return whole

    def close(self) -> None:
        """Stop the background thread and discard what it read ahead.

        Iterating again starts a new thread.
        """
        if self._ahead is not None:
            self._ahead.close()
            self._reading.stop()
            self._ahead = None


def build_train_loader(
    dataset: Any,
    *,
    micro_batch_size: int,
    data_rank: int | None = None,
    num_data_ranks: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    num_workers: int = 0,
    collate: Collate | None = None,
    prefetch: int = 2,
) -> TrainLoader:
    """Build an endless, exactly resumable loader of one rank's micro-batches.

    Args:
        dataset: an object with `len(ds)` and `ds[i] -> dict` or `get_batch(indices)`, or a dict of
            arrays with equal length, or a `DataLoader` (see `LoaderParts`).
        shuffle: whether an epoch is a permutation (default: true, or as the `DataLoader`).
        data_rank, num_data_ranks: select the part of every global batch that this process reads. By
            default every process of the job reads its own part. Tensor-parallel and
            pipeline-parallel ranks must read the same data: for them, pass `mesh.data_rank` and
            `mesh.data`.
        prefetch: number of micro-batches to read ahead in one background thread, which starts only
            if reading is slow.
        num_workers: number of threads that read one micro-batch together, for datasets with slow
            samples.
        collate: function that builds the batch from a list of samples, see `BatchReader`.

    Raises `DataError` for an empty dataset or impossible numbers.
    """
    layout = _layout(micro_batch_size, data_rank, num_data_ranks)
    reader = BatchReader(dataset, num_workers, collate=collate)
    parts = reader.parts
    of_all_ranks = micro_batch_size * layout.num_data_ranks
    if parts.batch_size not in (None, micro_batch_size, of_all_ranks):
        raise DataError(
            f"the DataLoader has batch_size={parts.batch_size}, but the run reads "
            f"{micro_batch_size} samples per rank and forward pass, {of_all_ranks} on "
            f"{layout.num_data_ranks} data ranks. Set train.train_micro_batch_size="
            f"{parts.batch_size} (micro_batch_size in Python), or a smaller number that gives "
            "this size on all data ranks together."
        )
    if shuffle is None:
        shuffle = parts.shuffle
    return TrainLoader(reader, layout, seed=seed, shuffle=shuffle, prefetch=prefetch)


def _layout(micro_batch_size: int, data_rank: int | None, num_data_ranks: int | None) -> DataLayout:
    """Return this process's share of the data: the given share, or one by its rank and the number
    of processes.
    """
    if (data_rank is None) != (num_data_ranks is None):
        raise DataError(
            f"data_rank={data_rank} and num_data_ranks={num_data_ranks}: set both, or neither to "
            "use this process's rank and the number of processes."
        )
    if data_rank is None or num_data_ranks is None:
        return DataLayout(micro_batch_size, get_rank(), get_world_size())
    return DataLayout(micro_batch_size, data_rank, num_data_ranks)


class EvalLoader:
    """Evaluation loader with a length.

    Each iteration yields `(batch, replicated)` over the dataset in order.

    Full global batches are split evenly across the ranks (`replicated=False`: every rank has
    different samples). The remaining samples go to *every* rank, in chunks of at most
    `micro_batch_size` samples (`replicated=True`: all ranks have the same samples, which must be
    counted once). `len()` and the flags are the same on all ranks, so collectives stay in step.
    """

    def __init__(
        self,
        reader: BatchReader,
        layout: DataLayout,
        *,
        seed: int = 0,
        max_batches: int | None = None,
        prefetch: int = 2,
    ):
        if max_batches is not None:
            check_sizes(DataError, max_batches=max_batches)
        self._reader = reader
        self.dataset = reader.dataset
        self.layout = layout
        check_range(_PREFETCH, DataError, prefetch=prefetch)
        self._prefetch = prefetch
        self._reading = RepeatableReading(
            type(self.dataset).__name__,
            self._read_slice,
            lambda slice_: keys_of(seed, np.arange(*slice_[:2])),
        )
        self._slices = self._cut(len(self.dataset))
        self._slices = self._slices[: self.num_items(max_batches)]

    def __len__(self) -> int:
        return len(self._slices)

    def num_items(self, max_batches: int | None) -> int:
        """Return the number of items that hold the samples of the first `max_batches` global
        batches; None: of all.

        The last global batch may be incomplete and then consists of several items.
        """
        full = len(self.dataset) // self.layout.samples_per_step
        if max_batches is None or max_batches > full:
            return len(self._slices)
        return max_batches

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        return self._reading.batches(
            lambda number: itertools.islice(self._slices, number, None), self._prefetch
        )

    def _read_slice(self, slice_: tuple[int, int, bool], seeds: Seeds | None) -> tuple[Batch, bool]:
        start, stop, replicated = slice_
        first = start if replicated else start - start % self.layout.samples_per_step
        together = np.arange(first, stop if replicated else first + self.layout.samples_per_step)
        return self._reader.read(np.arange(start, stop), together, seeds), replicated

    def _cut(self, num_samples: int) -> list[tuple[int, int, bool]]:
        """Return `(start, stop, replicated)` of every batch for this rank."""
        step, micro = self.layout.samples_per_step, self.layout.micro_batch_size
        num_full = num_samples // step
        full = [(*self.layout.slice_of_step(k * step), False) for k in range(num_full)]
        rest = [
            (start, min(start + micro, num_samples), True)
            for start in range(num_full * step, num_samples, micro)
        ]
        return full + rest


def build_eval_loader(
    dataset: Any,
    *,
    micro_batch_size: int,
    data_rank: int | None = None,
    num_data_ranks: int | None = None,
    seed: int = 0,
    max_batches: int | None = None,
    num_workers: int = 0,
    collate: Collate | None = None,
    prefetch: int = 2,
) -> EvalLoader:
    """Build an evaluation loader of `(batch, replicated)` pairs, see `EvalLoader`.

    `max_batches` keeps only the first batches, each of `micro_batch_size` samples per rank (a last,
    incomplete one is kept whole). The batch size of a `DataLoader` has no effect. `seed`: for
    samples that use global random generators; a sample gets the same numbers in every evaluation.
    The other arguments are the same as for `build_train_loader`. Raises `DataError` for an empty
    dataset or impossible numbers.
    """
    layout = _layout(micro_batch_size, data_rank, num_data_ranks)
    reader = BatchReader(dataset, num_workers, collate=collate)
    return EvalLoader(reader, layout, seed=seed, max_batches=max_batches, prefetch=prefetch)
