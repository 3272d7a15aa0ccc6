"""From a dataset and sample indices to one batch.

A batch is `dict[str, np.ndarray]`, first axis = samples, int64, float32 or bool. A dataset has `len(ds)` and
`ds[i] -> dict`; `ds.get_batch(indices) -> dict of arrays` is used instead of `ds[i]` where it exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import numpy as np

from libai.data.loading.errors import DataError, SampleError, checked_count
from libai.data.loading.processes import WorkerProcesses
from libai.utils.errors import UserError

Batch = dict[str, np.ndarray]
#: a list of what `ds[i]` returned → a batch
Collate = Callable[[list[Any]], Mapping[str, Any]]

MAX_WORKERS = 1024

_RIGHT_CODE = 'return a dict whose keys are arguments of model.forward, e.g. {"images": image, "labels": label}'


class InMemoryDataset:
    """Equally long arrays as a dataset; sample i holds row i of every array.

    >>> dataset = InMemoryDataset(images=np.zeros((4, 1, 8, 8)), labels=np.arange(4))
    >>> len(dataset), dataset[3]["labels"], dataset.get_batch(np.array([2, 0]))["labels"]
    (4, 3, array([2, 0]))

    Raises `DataError` when there is no array or the lengths differ.
    """

    def __init__(self, **arrays: Any):
        if not arrays:
            raise DataError("InMemoryDataset() was given no arrays: pass them by name, e.g. images=..., labels=....")
        self.arrays = {key: np.asarray(value) for key, value in arrays.items()}
        shapes = {key: array.shape for key, array in self.arrays.items()}
        if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            raise DataError(
                f"InMemoryDataset was given arrays of the shapes {shapes}: the first axis counts the samples and must "
                "be the same for all."
            )

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {key: array[index] for key, array in self.arrays.items()}

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices` of every array, each `(len(indices), ...)`."""
        return {key: array[indices] for key, array in self.arrays.items()}


def as_dataset(source: Any) -> Any:
    """`source` itself when it is a dataset; a mapping of equally long arrays becomes an `InMemoryDataset`.

    Raises `DataError` for anything without `len()` and `[i]` or `get_batch`, and for an empty dataset.
    """
    dataset = InMemoryDataset(**source) if isinstance(source, Mapping) else source
    name = type(dataset).__name__
    if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "get_batch")):
        raise DataError(
            f"a dataset was asked for and a {name} was found, which lacks len(ds) or ds[i]. Add both, pass a dict of "
            "arrays, or give an iterable of ready batches to the trainer directly, without a loader around it."
        )
    if len(dataset) == 0:
        raise DataError(f"{name} is empty (len 0), so there is nothing to read: check its path, split and filters.")
    return dataset


class BatchDataset(ABC):
    """Base of datasets that read many samples at once; `ds[i]` is a batch of one."""

    @abstractmethod
    def get_batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, one in each row of every array."""

    def __getitem__(self, index: int) -> Batch:
        return {name: rows[0] for name, rows in self.get_batch(np.array([index])).items()}


def read_rows(dataset: Any, indices: np.ndarray) -> Batch:
    """The samples of `dataset` at `indices`, by its `get_batch` where it has one, else stacked."""
    if hasattr(dataset, "get_batch"):
        return {key: np.asarray(values) for key, values in dataset.get_batch(indices).items()}
    samples = [dataset[int(index)] for index in indices]
    return {key: np.stack([np.asarray(sample[key]) for sample in samples]) for key in samples[0]}


def as_batch(dataset: Any, values: Mapping[str, Any], num_samples: int) -> Batch:
    """`values` of `dataset` as contiguous int64, float32 or bool arrays of `num_samples` rows, or `DataError`."""
    return {key: _as_batch_array(dataset, key, value, num_samples) for key, value in values.items()}


class BatchReader:
    """Reads the samples at given indices as one batch, shared by `num_workers` threads or processes.

    Threads are enough where reading files, decoding or NumPy takes the time, which release the interpreter lock;
    processes are for datasets whose own Python code does. `collate(samples) -> dict` makes the batch of a list of what
    `ds[i]` returned, in the trainer's process. One with a method `pad_to(samples, length)` is given the length that the
    longest of several ranks needs, by the dataset's attribute `lengths`.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 0,
        *,
        workers: Literal["threads", "processes"] = "threads",
        collate: Collate | None = None,
    ):
        checked_count("num_workers", num_workers, MAX_WORKERS, "no extra threads or processes")
        if workers not in ("threads", "processes"):
            raise DataError(f"workers={workers!r}: samples are read by 'threads' or 'processes'.")
        if collate is not None and not callable(collate):
            raise DataError(f"collate is a {type(collate).__name__}, not a function of a list of samples.")
        self.dataset = as_dataset(dataset)
        if collate is not None and not hasattr(self.dataset, "__getitem__"):
            raise DataError(f"collate needs single samples, and {type(self.dataset).__name__} has no ds[i]. Add it.")
        self._read_part = _read_chunk if collate is None else _read_samples
        self._collate = collate
        self._num_workers = num_workers
        self._workers: WorkerThreads | WorkerProcesses | None = None
        if num_workers:
            kind = WorkerThreads if workers == "threads" else WorkerProcesses
            self._workers = kind(self._read_part, self.dataset, num_workers)

    def read(self, indices: np.ndarray, together: np.ndarray | None = None) -> Batch:
        """The samples at `indices`, in this order. A failing sample raises with its index, see `SampleError`.

        `together`: what all ranks read at this moment, for collate functions that pad; default: `indices`.
        """
        chunks = np.array_split(indices, max(1, min(self._num_workers, len(indices))))
        if self._workers is None or (len(chunks) == 1 and isinstance(self._workers, WorkerThreads)):
            parts = [self._read_part(self.dataset, indices)]
        else:
            parts = self._workers.map(chunks)
        if self._collate is not None:
            samples = [sample for part in parts for sample in part]
            return self._collated(samples, indices if together is None else together)
        return self._joined(parts, chunks)

    def _joined(self, parts: Sequence[Any], chunks: list[np.ndarray]) -> Batch:
        if len(parts) == 1:
            return parts[0]
        for part, chunk in zip(parts, chunks):
            _check_same_keys(self.dataset, parts[0], part, chunk[0])
        try:
            return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        except ValueError as error:
            raise DataError(
                f"samples of {type(self.dataset).__name__} differ in shape and cannot be stacked into one batch "
                f"({error}): pad or crop them to one shape in the dataset, or give a collate function."
            ) from error

    def _collated(self, samples: list[Any], together: np.ndarray) -> Batch:
        collate, lengths = self._collate, getattr(self.dataset, "lengths", None)
        assert collate is not None
        if lengths is not None and hasattr(collate, "pad_to"):
            batch = collate.pad_to(samples, int(np.asarray(lengths)[together].max()))
        else:
            batch = collate(samples)
        if not isinstance(batch, Mapping):
            raise DataError(f"collate returned a {type(batch).__name__}, not a dict: {_RIGHT_CODE}.")
        return as_batch(self.dataset, batch, len(samples))

    def close(self) -> None:
        """Wait for the workers and end them."""
        if self._workers is not None:
            self._workers.close()


class WorkerThreads:
    """Calls `read(dataset, indices)` in threads, see `WorkerProcesses`."""

    def __init__(self, read: Callable[[Any, np.ndarray], Any], dataset: Any, num_workers: int):
        self._read = partial(read, dataset)
        self._pool = ThreadPoolExecutor(num_workers, "libai-data-worker")

    def map(self, chunks: Sequence[np.ndarray]) -> list[Any]:
        """`read` of every chunk, in order."""
        return list(self._pool.map(self._read, chunks))

    def close(self) -> None:
        """Wait for the threads and end them."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _read_samples(dataset: Any, indices: np.ndarray) -> list[Any]:
    """What `ds[i]` returns, one after the other."""
    samples = []
    for index in indices.tolist():
        try:
            samples.append(dataset[index])
        except Exception as error:
            raise _reading_failed(dataset, f"sample {index}", error) from error
    return samples


def _read_chunk(dataset: Any, indices: np.ndarray) -> Batch:
    if hasattr(dataset, "get_batch"):
        try:
            batch = dataset.get_batch(indices)
        except Exception as error:
            raise _reading_failed(dataset, f"samples {_some(indices)}", error) from error
        if not isinstance(batch, Mapping):
            raise _not_a_dict(dataset, "get_batch", batch)
    else:
        batch = _stack(dataset, indices)
    return as_batch(dataset, batch, len(indices))


def _stack(dataset: Any, indices: np.ndarray) -> Batch:
    samples = _read_samples(dataset, indices)
    for index, sample in zip(indices, samples):
        if not isinstance(sample, Mapping):
            raise _not_a_dict(dataset, f"sample {index}", sample)
        _check_same_keys(dataset, samples[0], sample, index)
    return {key: _stack_key(dataset, key, [sample[key] for sample in samples]) for key in samples[0]}


def _stack_key(dataset: Any, key: str, values: list[Any]) -> np.ndarray:
    arrays = [_to_numpy(value) for value in values]
    try:
        return np.stack(arrays)
    except ValueError as error:
        raise DataError(
            f"{key!r} of {type(dataset).__name__} has the shapes {sorted({a.shape for a in arrays})} within one batch, "
            "which cannot be stacked: pad or crop the samples to one shape in the dataset, or give a collate "
            "function, such as libai.data.PadCollate."
        ) from error


def _as_batch_array(dataset: Any, key: str, value: Any, num_samples: int) -> np.ndarray:
    """`value` as a contiguous int64, float32 or bool array whose first axis counts `num_samples`."""
    array = _to_numpy(value)
    if array.ndim == 0 or len(array) != num_samples:
        raise DataError(
            f"{key!r} of {type(dataset).__name__} has the shape {array.shape} for {num_samples} samples: "
            "the first axis of every entry of a batch counts the samples."
        )
    if array.dtype.kind in "iu":
        return np.ascontiguousarray(array, dtype=np.int64)
    if array.dtype.kind == "f":
        return np.ascontiguousarray(array, dtype=np.float32)
    if array.dtype.kind == "b":
        return np.ascontiguousarray(array)
    raise DataError(
        f"{key!r} of {type(dataset).__name__} holds {array.dtype} values, which cannot become a tensor: "
        "give numbers or booleans, or leave the key out."
    )


def _to_numpy(value: Any) -> np.ndarray:
    # A dataset may hold tensors of oneflow (or of any library with the same method): no import needed to read them.
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _check_same_keys(dataset: Any, first: Mapping, other: Mapping, index: int) -> None:
    if first.keys() != other.keys():
        raise DataError(
            f"sample {index} of {type(dataset).__name__} has the keys {sorted(other)}, others have {sorted(first)}: "
            "every sample must have the same keys."
        )


def _reading_failed(dataset: Any, what: str, error: Exception) -> Exception:
    text = f"reading {what} of {type(dataset).__name__} failed: {error}"
    if isinstance(error, UserError):
        return DataError(text)
    return SampleError(f"{text} ({type(error).__name__})")


def _not_a_dict(dataset: Any, what: str, found: Any) -> DataError:
    return DataError(f"{what} of {type(dataset).__name__} is a {type(found).__name__}, not a dict: {_RIGHT_CODE}.")


def _some(indices: np.ndarray) -> str:
    shown = ", ".join(map(str, indices[:8].tolist()))
    return f"{shown}, ... ({len(indices)} in all)" if len(indices) > 8 else shown
