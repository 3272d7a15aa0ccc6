"""Several datasets as one, mixed by weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libai.data.loading.batches import BatchDataset, as_dataset, read_rows
from libai.data.loading.errors import DataError


class BlendedDataset(BatchDataset):
    """Samples of several datasets in the shares `weights`, spread evenly over one pass.

    A pass has `num_samples` samples, by default as many as all datasets hold. A dataset whose share is larger than
    itself is read again from its beginning; of one whose share is smaller the last samples are left out. Everything is
    a function of the arguments alone. A dataset that changes its batches (`augment_batch`) goes around the blend.

    >>> blend = BlendedDataset([{"x": np.arange(4)}, {"x": np.arange(10, 14)}], weights=[3, 1], num_samples=4)
    >>> blend.get_batch(np.arange(4))["x"].tolist()
    [0, 1, 10, 2]
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], *, num_samples: int | None = None):
        self.datasets = [as_dataset(dataset) for dataset in datasets]
        shares = np.asarray(weights, np.float64)
        if shares.shape != (len(self.datasets),) or not len(shares) or not (np.isfinite(shares) & (shares > 0)).all():
            raise DataError(f"weights={list(weights)} of {len(datasets)} datasets: give each one a number above 0.")
        for dataset in self.datasets:
            if hasattr(dataset, "augment_batch"):
                name = type(dataset).__name__
                raise DataError(f"{name} changes its batches: blend what it reads, and put {name} around the blend.")
        total = sum(map(len, self.datasets)) if num_samples is None else num_samples
        if total < 1:
            raise DataError(f"num_samples={num_samples}: a pass has at least one sample.")
        counts = _counts(shares / shares.sum(), total)
        sources = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((numbers + 0.5) / counts[sources], kind="stable")
        self._sources = sources[order].astype(np.min_scalar_type(len(counts)))
        self._rows = (numbers % np.array(list(map(len, self.datasets)))[sources])[order]

    def __len__(self) -> int:
        return len(self._rows)

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples at `indices`, read from each dataset at once."""
        indices = np.asarray(indices)
        sources, rows = self._sources[indices], self._rows[indices]
        found: dict[str, np.ndarray] = {}
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            for name, values in read_rows(self.datasets[source], rows[mine]).items():
                if name not in found:
                    found[name] = np.empty((len(indices), *values.shape[1:]), values.dtype)
                if found[name].shape[1:] != values.shape[1:]:
                    raise DataError(
                        f"{name!r} has the shapes {found[name].shape[1:]} and {values.shape[1:]} in blended datasets: "
                        "give all one shape, such as one sequence_length."
                    )
                found[name][mine] = values
        return found


def _counts(shares: np.ndarray, total: int) -> np.ndarray:
    """How many of `total` samples each share gets: the largest remainders are rounded up."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts
