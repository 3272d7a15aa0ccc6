"""From a dataset and sample indices to one batch.

A batch is `dict[str, np.ndarray]`, first axis = samples, int64, float32 or bool. A dataset has `len(ds)` and
`ds[i] -> dict`; `ds.get_batch(indices) -> dict of arrays` is used instead of `ds[i]` where it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from libai.data.datasets import Batch, as_dataset
from libai.data.errors import DataError, SampleError, checked_count
from libai.utils.errors import UserError

#: a list of what `ds[i]` returned → a batch
Collate = Callable[[list[Any]], Mapping[str, Any]]

MAX_WORKERS = 1024


class BatchReader:
    """Reads the samples at given indices as one batch, shared by `num_workers` threads.

    Threads are enough where reading files, decoding or NumPy takes the time, which release the interpreter lock.
    `collate(samples) -> dict` makes the batch of a list of what `ds[i]` returned. One with a method
    `pad_to(samples, length)` is given the length that the longest of several ranks needs, by the dataset's attribute
    `lengths`.
    """

    def __init__(self, dataset: Any, num_workers: int = 0, *, collate: Collate | None = None):
        checked_count("num_workers", num_workers, MAX_WORKERS, "no extra threads")
        if collate is not None and not callable(collate):
            raise DataError(f"collate is a {type(collate).__name__}, not a function of a list of samples.")
        self.dataset = as_dataset(dataset)
        self._has_batches = collate is None and hasattr(self.dataset, "get_batch")
        if not self._has_batches and not hasattr(self.dataset, "__getitem__"):
            raise DataError(f"collate needs single samples, and {type(self.dataset).__name__} has no ds[i]. Add it.")
        lengths = getattr(self.dataset, "lengths", None)
        if lengths is not None and len(lengths) != len(self.dataset):
            raise DataError(
                f"{type(self.dataset).__name__}.lengths has {len(lengths)} numbers, and the dataset "
                f"{len(self.dataset)} samples: give one for each, or remove it."
            )
        self._lengths = None if lengths is None else np.asarray(lengths)
        self._collate = collate
        self._num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, "libai-data-worker") if num_workers else None

    def read(self, indices: np.ndarray, together: np.ndarray | None = None) -> Batch:
        """The samples at `indices`, in this order. A failing sample raises with its index, see `SampleError`.

        `together`: what all ranks read at this moment, for collate functions that pad; default: `indices`.
        """
        read = partial(_read_rows if self._has_batches else _read_samples, self.dataset)
        chunks = np.array_split(indices, max(1, min(self._num_workers, len(indices))))
        if self._pool is None or len(chunks) == 1:
            parts: list[Any] = [read(indices)]
        else:
            parts = list(self._pool.map(read, chunks))
        batch: Mapping[str, Any]
        if self._has_batches:
            batch = parts[0] if len(parts) == 1 else _combined(self.dataset, parts, np.concatenate)
        else:
            samples = [sample for part in parts for sample in part]
            if self._collate is None:
                batch = _combined(self.dataset, samples, np.stack)
            else:
                batch = self._collated(samples, indices if together is None else together)
        return as_batch(self.dataset, batch, len(indices))

    def _collated(self, samples: list[Any], together: np.ndarray) -> Mapping[str, Any]:
        collate: Any = self._collate
        if self._lengths is not None and hasattr(collate, "pad_to"):
            batch = collate.pad_to(samples, int(self._lengths[together].max()))
        else:
            batch = collate(samples)
        return _checked_dict("what collate returned for samples", self.dataset, batch)


def as_batch(dataset: Any, values: Mapping[str, Any], num_samples: int) -> Batch:
    """`values` of `dataset` as contiguous int64, float32 or bool arrays of `num_samples` rows, or `DataError`."""
    batch = {}
    for key, value in values.items():
        array = _to_numpy(value)
        if array.ndim == 0 or len(array) != num_samples:
            raise DataError(
                f"{key!r} of {type(dataset).__name__} has the shape {array.shape} for {num_samples} samples: "
                "the first axis of every entry of a batch counts the samples."
            )
        dtype = {"i": np.int64, "u": np.int64, "f": np.float32, "b": np.bool_}.get(array.dtype.kind)
        if dtype is None:
            raise DataError(
                f"{key!r} of {type(dataset).__name__} holds {array.dtype} values, which cannot become a tensor: "
                "give numbers or booleans, or leave the key out."
            )
        batch[key] = np.ascontiguousarray(array, dtype=dtype)
    return batch


def _read_samples(dataset: Any, indices: np.ndarray) -> list[Any]:
    """Call `ds[i]` for one index after the other."""
    samples = []
    for index in indices.tolist():
        try:
            samples.append(dataset[index])
        except Exception as error:
            raise _reading_failed(dataset, f"sample {index}", error) from error
    return samples


def _read_rows(dataset: Any, indices: np.ndarray) -> Mapping[str, Any]:
    try:
        batch = dataset.get_batch(indices)
    except Exception as error:
        raise _reading_failed(dataset, f"samples {', '.join(map(str, indices[:8].tolist()))}", error) from error
    return _checked_dict("get_batch", dataset, batch)


def _combined(dataset: Any, parts: Sequence[Any], combine: Callable[[list[np.ndarray]], np.ndarray]) -> Batch:
    """One dict of arrays of many: samples that are stacked, or parts of a batch that are joined."""
    first = _checked_dict("a sample", dataset, parts[0])
    for part in parts:
        if not isinstance(part, Mapping) or part.keys() != first.keys():
            found = sorted(part) if isinstance(part, Mapping) else f"a {type(part).__name__}"
            raise DataError(
                f"samples of {type(dataset).__name__} have the keys {sorted(first)} and {found}: every sample must "
                "have the same keys."
            )
    batch = {}
    for key in first:
        arrays = [_to_numpy(part[key]) for part in parts]
        try:
            batch[key] = combine(arrays)
        except ValueError as error:
            raise DataError(
                f"{key!r} of {type(dataset).__name__} has the shapes {sorted({a.shape for a in arrays})} within one "
                "batch, which cannot be stacked: pad or crop the samples to one shape in the dataset, or give a "
                "collate function, such as libai.data.PadCollate."
            ) from error
    return batch


def _to_numpy(value: Any) -> np.ndarray:
    # A dataset may hold tensors of oneflow (or of any library with the same method): no import needed to read them.
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _checked_dict(what: str, dataset: Any, found: Any) -> Mapping[str, Any]:
    if isinstance(found, Mapping):
        return found
    raise DataError(
        f"{what} of {type(dataset).__name__} is a {type(found).__name__}, not a dict: return a dict whose keys are "
        'arguments of model.forward, e.g. {"images": image, "labels": label}.'
    )


def _reading_failed(dataset: Any, what: str, error: Exception) -> Exception:
    text = f"reading {what} of {type(dataset).__name__} failed: {error}"
    if isinstance(error, UserError):
        return DataError(text)
    return SampleError(f"{text} ({type(error).__name__})")


class PadCollate:
    """A collate function that pads arrays along their first axis to the longest of the batch.

    Args:
        padding: key -> value to fill with, such as `{"input_ids": 0, "labels": -100}`. Other keys must have one shape.
        multiple_of: lengths are rounded up to it; few different shapes suit graph mode, which compiles one of them.
        max_length: longer samples are cut.
        mask: name of a further bool array that is true where a sample has a value.

    >>> pad = PadCollate({"x": 0}, multiple_of=4)
    >>> pad([{"x": [1, 2]}, {"x": [3]}])["x"].tolist()
    [[1, 2, 0, 0], [3, 0, 0, 0]]
    """

    def __init__(
        self,
        padding: Mapping[str, float],
        *,
        multiple_of: int = 1,
        max_length: int | None = None,
        mask: str | None = None,
    ):
        if not padding or multiple_of < 1 or (max_length is not None and max_length < 1):
            raise DataError(
                f"PadCollate(padding={dict(padding)}, multiple_of={multiple_of}, max_length={max_length}): name at "
                "least one key to pad, and lengths of at least 1."
            )
        self._padding = dict(padding)
        self._multiple_of = multiple_of
        self._max_length = max_length
        self._mask = mask

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of `samples`."""
        return self.pad_to(samples, self._longest(samples))

    def pad_to(self, samples: Sequence[Mapping[str, Any]], length: int) -> dict[str, Any]:
        """The batch of `samples`, as long as a sample of `length` needs it. Raises `DataError` if one is longer."""
        longest = self._longest(samples)
        length = -(-length // self._multiple_of) * self._multiple_of
        length = min(length, self._max_length or length)
        if min(longest, self._max_length or longest) > length:
            raise DataError(f"a sample has {longest} items, and `lengths` of its dataset allow {length}: correct them.")
        batch: dict[str, Any] = {}
        for key, values in ((key, [sample[key] for sample in samples]) for key in samples[0]):
            if key in self._padding:
                batch[key] = _padded(values, self._padding[key], length)
            else:
                batch[key] = _stacked(key, values)
        if self._mask is not None:
            first = next(iter(self._padding))
            ends = np.array([min(len(sample[first]), length) for sample in samples])
            batch[self._mask] = np.arange(length) < ends[:, None]
        return batch

    def _longest(self, samples: Sequence[Mapping[str, Any]]) -> int:
        for sample in samples:
            missing = [key for key in self._padding if not isinstance(sample, Mapping) or key not in sample]
            if missing:
                found = sorted(sample) if isinstance(sample, Mapping) else f"is a {type(sample).__name__}"
                raise DataError(f"PadCollate pads {missing[0]!r}, and a sample has {found}. Name one of its keys.")
        return max(len(sample[key]) for sample in samples for key in self._padding)


def _padded(values: Sequence[Any], fill: float, length: int) -> np.ndarray:
    arrays = [np.asarray(value)[:length] for value in values]
    padded = np.full((len(arrays), length, *arrays[0].shape[1:]), fill, arrays[0].dtype)
    for row, array in zip(padded, arrays):
        row[: len(array)] = array
    return padded


def _stacked(key: str, values: Sequence[Any]) -> np.ndarray:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        raise DataError(f"{key!r} differs in shape ({error}): name a value to pad it with.") from None
