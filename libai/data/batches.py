"""Read the samples at given indices of a dataset as one batch.

A batch is a `dict[str, np.ndarray]` of int64, float32 or bool arrays, whose first axis counts the
samples. A dataset has `len(ds)` and `ds[i] -> dict` (or tuple, see `named_items`). If it also has
`ds.get_batch(indices) -> dict of arrays`, that is used instead of `ds[i]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import getitem
from typing import Any

import numpy as np

from libai.data.datasets import Batch, as_dataset
from libai.data.errors import DataError, SampleError
from libai.data.random_state import THREAD, Seeds
from libai.data.torch_loader import LoaderParts
from libai.utils.errors import UserError
from libai.utils.sizes import check_range, check_sizes

#: function that turns a list of the values returned by `ds[i]` into a batch
Collate = Callable[[list[Any]], Mapping[str, Any]]


class BatchReader:
    """Reads the samples at given indices as one batch, with the work divided among `num_workers`
    threads.

    Threads are sufficient when most of the time is spent on reading files, decoding or NumPy,
    because these release the interpreter lock. `collate(samples) -> dict` builds the batch from a
    list of the values returned by `ds[i]`. A collate function can also have a method
    `pad_to(samples, length)`. If the dataset has an attribute `lengths`, that method is called
    instead, with the length of the longest sample on any rank. `parts`: what `dataset` is made of.
    """

    def __init__(self, dataset: Any, num_workers: int = 0, *, collate: Collate | None = None):
        check_range("0 <= x <= 1024", DataError, num_workers=num_workers)
        if collate is not None and not callable(collate):
            raise DataError(
                f"collate is a {type(collate).__name__}, not a function of a list of samples."
            )
        self.parts = LoaderParts.of(dataset)
        collate = collate or self.parts.collate
        self.dataset = as_dataset(self.parts.dataset)
        self._name = type(self.dataset).__name__
        self.collate = collate
        self._has_batches = collate is None and hasattr(self.dataset, "get_batch")
        if not self._has_batches and not hasattr(self.dataset, "__getitem__"):
            raise DataError(f"collate needs single samples, but {self._name} has no ds[i]. Add it.")
        get = self.dataset.get_batch if self._has_batches else partial(getitem, self.dataset)
        self._read = partial(_read, self._name, get)
        self._lengths = getattr(self.dataset, "lengths", None)
        if self._lengths is not None and len(self._lengths) != len(self.dataset):
            raise DataError(
                f"{self._name}.lengths has {len(self._lengths)} numbers, but the dataset has "
                f"{len(self.dataset)} samples: provide one number per sample, or remove it."
            )
        self._num_workers = num_workers
        self._map = ThreadPoolExecutor(num_workers, "libai-data-worker").map if num_workers else map

    def read(
        self,
        indices: np.ndarray,
        together: np.ndarray | None = None,
        seeds: Seeds | None = None,
    ) -> Batch:
        """Return the samples at `indices`, in this order.

        An error in a sample is raised with its index, see `SampleError`.

        `together`: indices that all ranks read in this step, for collate functions that pad
        (default: `indices`). `seeds`: seeds the global generators for each sample. The samples are
        then read one after another in the calling thread.
        """
        collate = self.collate
        num_parts = max(1, min(self._num_workers, len(indices)))
        workers: Callable[..., Iterable[Any]] = self._map
        read: Callable[..., Any] = self._read
        if seeds is not None:
            workers = map
            num_parts = len(indices)
            read = seeds.before(read)
        wanted = np.array_split(indices, num_parts) if self._has_batches else indices.tolist()
        parts = list(workers(read, wanted))
        if seeds is not None:
            seeds.for_batch()
        batch: Mapping[str, Any]
        if collate is None:
            batch = _combined(self._name, parts, self._has_batches)
        elif self._lengths is not None and hasattr(collate, "pad_to"):
            longest = np.asarray(self._lengths)[indices if together is None else together].max()
            batch = collate.pad_to(parts, int(longest))
        else:
            batch = collate(parts)
        batch = _checked_dict(f"the result of collate for samples of {self._name}", batch)
        return as_batch(self._name, batch, len(indices))


def as_batch(name: str, values: Mapping[str, Any], num_samples: int) -> Batch:
    """Convert the `values` of the dataset `name` to contiguous int64, float32 or bool arrays with
    `num_samples` rows.

    Raises `DataError` if a value has a different number of rows or cannot be converted.
    """
    batch = {}
    for key, value in values.items():
        array = _to_numpy(value)
        if array.ndim == 0 or len(array) != num_samples:
            raise DataError(
                f"{key!r} of {name} has the shape {array.shape} for "
                f"{num_samples} samples: the first axis of every entry of a batch counts the "
                "samples."
            )
        dtype = {"i": np.int64, "u": np.int64, "f": np.float32, "b": np.bool_}.get(array.dtype.kind)
        if dtype is None:
            raise DataError(
                f"{key!r} of {name} contains {array.dtype} values, which cannot "
                "be converted to a tensor: use numbers or booleans, or remove the key."
            )
        batch[key] = np.ascontiguousarray(array, dtype=dtype)
    return batch


def _read(name: str, get: Callable[[Any], Any], index: Any) -> Any:
    """Return the sample, or the batch of samples, at `index`."""
    try:
        with THREAD.reading:
            return get(index)
    except Exception as error:
        numbers = ", ".join(map(str, np.ravel(index)[:8].tolist()))
        text = f"reading sample{'s' * np.ndim(index)} {numbers} of {name} failed: {error}"
        if isinstance(error, UserError):
            raise DataError(text) from error
        raise SampleError(f"{text} ({type(error).__name__})") from error


def _combined(name: str, parts: Sequence[Any], are_batches: bool) -> Mapping[str, Any]:
    """Combine many dicts of arrays into one: stack samples, or concatenate the parts of a batch."""
    parts = list(map(named_items, parts))
    first = _checked_dict(f"{'get_batch' if are_batches else 'a sample'} of {name}", parts[0])
    if are_batches and len(parts) == 1:
        return first
    combine = np.concatenate if are_batches else np.stack
    for part in parts:
        if not isinstance(part, Mapping) or part.keys() != first.keys():
            found = sorted(part) if isinstance(part, Mapping) else f"a {type(part).__name__}"
            raise DataError(
                f"samples of {name} have the keys {sorted(first)} and {found}: "
                "every sample must have the same keys."
            )
    batch = {}
    for key in first:
        arrays = _arrays_of([part[key] for part in parts])
        try:
            batch[key] = combine(arrays)
        except ValueError as error:
            raise DataError(
                f"{key!r} of {name} has the shapes "
                f"{sorted({a.shape for a in arrays})} within one batch, which cannot be stacked: "
                "pad or crop the samples to one shape in the dataset, or pass a collate function, "
                "such as libai.data.PadCollate."
            ) from error
    return batch


def _arrays_of(values: Sequence[Any]) -> list[np.ndarray]:
    """Return values as arrays. Every single tensor would wait for OneFlow's thread: 1 ms each."""
    flow = sys.modules.get("oneflow")
    kinds = {(type(value), getattr(value, "shape", None)) for value in values}
    if flow is not None and len(kinds) == 1 and isinstance(values[0], flow.Tensor):
        return list(flow.stack(values).numpy())
    return list(map(_to_numpy, values))


def _to_numpy(value: Any) -> np.ndarray:
    # A dataset may return OneFlow tensors, or any objects with a `numpy()` method; this needs no
    # import of oneflow.
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def named_items(items: Any) -> Any:
    """Return the items of a tuple or list by name: x, x2, x3 …, and y for the last of several.

    Other values are returned unchanged.

    >>> named_items((1, 2))
    {'x': 1, 'y': 2}
    """
    is_sequence = isinstance(items, tuple | list) and bool(items)
    if not is_sequence or isinstance(items[0], Mapping):  # the latter are samples
        return items
    inputs = ["x", *(f"x{number}" for number in range(2, len(items)))]
    return dict(zip([*inputs, "y"][: len(items)], items))


def _checked_dict(what: str, found: Any) -> Mapping[str, Any]:
    items = named_items(found)
    if isinstance(items, Mapping):
        return items
    raise DataError(
        f"{what} is a {type(found).__name__}, not a dict or a tuple: return a "
        "dict whose keys are "
        'arguments of model.forward, e.g. {"images": image, "labels": label}.'
    )


@dataclass(frozen=True)
class PadCollate:
    """A collate function that pads arrays along their first axis to the longest of the batch.

    Args:
        padding: key -> value to fill with, such as `{"input_ids": 0, "labels": -100}`. Other keys
            must have one shape.
        multiple_of: lengths are rounded up to a multiple of this. Graph mode compiles one graph per
            shape, so fewer shapes are better.
        max_length: samples longer than this are truncated.
        mask: name of an additional bool array that is true at real values and false at padding.

    >>> pad = PadCollate({"x": 0}, multiple_of=4)
    >>> pad([{"x": [1, 2]}, {"x": [3]}])["x"].tolist()
    [[1, 2, 0, 0], [3, 0, 0, 0]]
    """

    padding: Mapping[str, float]
    _: KW_ONLY
    multiple_of: int = 1
    max_length: int | None = None
    mask: str | None = None

    def __post_init__(self) -> None:
        if not self.padding:
            raise DataError("PadCollate(padding={}): give at least one key to pad.")
        longest = 1 if self.max_length is None else self.max_length
        check_sizes(DataError, multiple_of=self.multiple_of, max_length=longest)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`, padded to the longest of them."""
        return self.pad_to(samples, self._longest(samples))

    def pad_to(self, samples: Sequence[Mapping[str, Any]], length: int) -> dict[str, Any]:
        """Return the batch of `samples`, padded as if the longest sample had `length` items.

        Raises `DataError` if a sample is longer.
        """
        longest = self._longest(samples)
        length = -(-length // self.multiple_of) * self.multiple_of
        length = min(length, self.max_length or length)
        if min(longest, self.max_length or longest) > length:
            raise DataError(
                f"a sample has {longest} items, but the `lengths` of its dataset allow only "
                f"{length}: correct the lengths."
            )
        batch = {}
        for key in samples[0]:
            values = [sample[key] for sample in samples]
            if key in self.padding:
                batch[key] = _padded(values, self.padding[key], length)
            else:
                batch[key] = _stacked(key, values)
        if self.mask is not None:
            first = next(iter(self.padding))
            ends = np.array([min(len(sample[first]), length) for sample in samples])
            batch[self.mask] = np.arange(length) < ends[:, None]
        return batch

    def _longest(self, samples: Sequence[Mapping[str, Any]]) -> int:
        for sample in samples:
            if not isinstance(sample, Mapping) or not self.padding.keys() <= sample.keys():
                found = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
                raise DataError(
                    f"PadCollate pads {', '.join(map(repr, self.padding))}, but a sample only has "
                    f"{found}. Use its keys."
                )
        return max(len(sample[key]) for sample in samples for key in self.padding)


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
        raise DataError(
            f"{key!r} differs in shape ({error}): give a padding value for it."
        ) from None
