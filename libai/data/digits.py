"""The handwritten digits that come with scikit-learn: 1797 grey images of 8 x 8, no download."""

from __future__ import annotations

import numpy as np

from libai.data.errors import DataError
from libai.data.images import random_shift
from libai.data.sampling import SampleRandom
from libai.data.splits import stratified_split


class DigitsDataset:
    """`images` float32 `(1, 8, 8)` in [0, 1] and `labels` 0..9, one split of a stratified cut.

    `seed` chooses the cut and is the same for both splits of a run; `augment=True` shifts training images by up to one
    pixel. Raises `DataError` when scikit-learn is not installed or the split does not exist.
    """

    num_classes = 10

    def __init__(self, split: str = "train", *, validation_fraction: float = 0.2, seed: int = 0, augment: bool = False):
        pixels, labels = _load()
        splits = stratified_split(labels, validation_fraction, seed)
        if split not in splits:
            raise DataError(f"split={split!r} was asked for, the digits have {sorted(splits)}: use one of them.")
        self.indices = splits[split]
        self.images = (pixels[self.indices] / 16).astype(np.float32)[:, None]
        self.labels = labels[self.indices].astype(np.int64)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"images": self.images[index], "labels": self.labels[index]}

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """`images` float32 `(B, 1, 8, 8)` and `labels` int64 `(B,)`."""
        return {"images": self.images[indices], "labels": self.labels[indices]}

    def augment_batch(self, batch: dict[str, np.ndarray], random: SampleRandom) -> dict[str, np.ndarray]:
        """Called by the train loader: the batch, its images shifted when `augment=True`."""
        if not self.augment:
            return batch
        return {**batch, "images": random_shift(batch["images"], random.uniform(2), max_pixels=1)}


def _load() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"the digits come with scikit-learn, which cannot be imported here ({error}): pip install scikit-learn."
        ) from error
    digits = load_digits()
    return digits.images, digits.target
