"""A dataset of arrays that are already in memory, for tests, notebooks and small problems."""

from __future__ import annotations

from typing import Any

import numpy as np

from libai.data.errors import DataError


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
