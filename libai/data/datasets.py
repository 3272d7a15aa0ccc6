"""The dataset protocol, datasets of in-memory arrays, and weighted mixtures of datasets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libai.data.errors import DataError

Batch = dict[str, np.ndarray]


class InMemoryDataset:
    """A dataset of arrays with equal length. Sample i contains row i of every array.

    >>> dataset = InMemoryDataset(images=np.zeros((4, 1, 8, 8)), labels=np.arange(4))
    >>> len(dataset), dataset[3]["labels"], dataset.get_batch(np.array([2, 0]))["labels"]
    (4, 3, array([2, 0]))

    Raises `DataError` if there is no array or the lengths differ.
    """

    def __init__(self, **arrays: Any):
        if not arrays:
            raise DataError(
                "InMemoryDataset() was given no arrays: pass them by name, e.g. images=..., "
                "labels=...."
            )
        self.arrays = {key: np.asarray(value) for key, value in arrays.items()}
        shapes = {key: array.shape for key, array in self.arrays.items()}
        if (
            any(not shape for shape in shapes.values())
            or len({shape[0] for shape in shapes.values()}) > 1
        ):
            raise DataError(
                f"InMemoryDataset was given arrays of the shapes {shapes}: the first axis counts "
                "the samples and must be the same for all."
            )

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def get_batch(self, indices: np.ndarray) -> Batch:
        """Return the rows at `indices` of every array, each `(len(indices), ...)`."""
        return {key: array[indices] for key, array in self.arrays.items()}

    __getitem__ = get_batch  # the index of one sample selects a row without its first axis


def as_dataset(source: Any) -> Any:
    """Return `source` as a dataset.

    A mapping of arrays with equal length becomes an `InMemoryDataset`.

    Raises `DataError` for an empty dataset, and for an object without `len()` and either `[i]` or
    `get_batch`.
    """
    dataset = InMemoryDataset(**source) if isinstance(source, Mapping) else source
    name = type(dataset).__name__
    if not hasattr(dataset, "__len__") or not (
        hasattr(dataset, "__getitem__") or hasattr(dataset, "get_batch")
    ):
        raise DataError(
            f"expected a dataset, found a {name} without len(ds) or ds[i]. Add both, pass a dict "
            "of arrays, or pass an iterable of complete batches directly to the trainer, without "
            "this loader."
        )
    if len(dataset) == 0:
        raise DataError(
            f"{name} is empty (len 0), so there is nothing to read: check its path, split and "
            "filters."
        )
    return dataset


class BatchDataset(ABC):
    """Base of datasets that read many samples at once. `ds[i]` reads a batch of one sample."""

    @abstractmethod
    def get_batch(self, indices: np.ndarray) -> Batch:
        """Return the samples at `indices`, one per row of every array."""

    def __getitem__(self, index: int) -> Batch:
        return {name: rows[0] for name, rows in self.get_batch(np.array([index])).items()}


def read_rows(dataset: Any, indices: np.ndarray) -> Batch:
    """Return the samples of `dataset` at `indices`.

    Without a `get_batch`, samples are read one by one and stacked.
    """
    if hasattr(dataset, "get_batch"):
        return {key: np.asarray(values) for key, values in dataset.get_batch(indices).items()}
    samples = [dataset[int(index)] for index in indices]
    return {key: np.stack([np.asarray(sample[key]) for sample in samples]) for key in samples[0]}


class BlendedDataset(BatchDataset):
    """A mixture of several datasets in the proportions `weights`, spread evenly over one epoch.

    The length of the mixture is the sum of the lengths of all datasets. If a dataset's share
    exceeds its length, its samples repeat from the beginning. If the share is smaller, its last
    samples are never used. The order depends only on the arguments. Datasets with `augment_batch`
    cannot be blended: wrap the blend in them instead.

    >>> blend = BlendedDataset([{"x": np.arange(4)}, {"x": np.arange(10, 14)}], weights=[3, 1])
    >>> blend.get_batch(np.arange(8))["x"].tolist()
    [0, 1, 10, 2, 3, 0, 11, 1]
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float]):
        self.datasets = [as_dataset(dataset) for dataset in datasets]
        shares = np.asarray(weights, np.float64)
        if (
            shares.shape != (len(self.datasets),)
            or not len(shares)
            or not (np.isfinite(shares) & (shares > 0)).all()
        ):
            raise DataError(
                f"weights={list(weights)} of {len(datasets)} datasets: each dataset needs a "
                "number above 0."
            )
        for dataset in self.datasets:
            if hasattr(dataset, "augment_batch"):
                name = type(dataset).__name__
                raise DataError(
                    f"{name} changes its batches: blend the datasets inside it, and wrap the "
                    f"blend in {name}."
                )
        lengths = np.array(list(map(len, self.datasets)))
        ends = np.round(np.cumsum(shares) / shares.sum() * lengths.sum()).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        sources = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((numbers + 0.5) / counts[sources], kind="stable")
        self._sources = sources[order].astype(np.min_scalar_type(len(counts)))
        self._rows = (numbers % lengths[sources])[order]

    def __len__(self) -> int:
        return len(self._rows)

    def get_batch(self, indices: np.ndarray) -> Batch:
        """Return the samples at `indices`, with a single read from each dataset."""
        sources, rows = self._sources[indices], self._rows[indices]
        parts = [
            read_rows(self.datasets[source], rows[sources == source])
            for source in np.unique(sources)
        ]
        places = np.argsort(np.argsort(sources, kind="stable"), kind="stable")
        try:
            return {
                name: np.concatenate([part[name] for part in parts])[places] for name in parts[0]
            }
        except (KeyError, ValueError) as error:
            raise DataError(
                f"blended datasets have samples of different shapes or keys ({error}): make them "
                "equal, for example with one sequence_length."
            ) from None
