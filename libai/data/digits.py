"""The handwritten digits that come with scikit-learn: 1797 grey images of 8 x 8, no download."""

from __future__ import annotations

import numpy as np

from libai.data.errors import DataError
from libai.data.images import random_shift
from libai.data.sampling import SampleRandom


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


def stratified_split(labels: np.ndarray, validation_fraction: float, seed: int) -> dict[str, np.ndarray]:
    """`{"train": indices, "validation": indices}`, sorted, disjoint, with the same share of every class.

    A pure function of its arguments. Raises `DataError` when a class would be missing from one of the two.
    """
    validation = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        num_validation = round(validation_fraction * len(members))
        if not 0 < num_validation < len(members):
            raise DataError(
                f"validation_fraction={validation_fraction} gives class {label} {num_validation} of its {len(members)} "
                "samples for validation: choose a share that leaves at least one on both sides."
            )
        shuffled = np.random.default_rng([seed, int(label)]).permutation(members)
        validation.append(shuffled[:num_validation])
    chosen = np.sort(np.concatenate(validation))
    return {"train": np.setdiff1d(np.arange(len(labels)), chosen), "validation": chosen}
