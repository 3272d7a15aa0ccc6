"""Mixup and CutMix: a training image with a share of another one, and labels in the same proportion.

The other image and the share depend on the seed and on the sample's place in the training alone, so they are the same
on any number of ranks and after a resume. For that the other image is read from the dataset, not taken from the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libai.data.loading.batches import as_dataset, read_rows
from libai.data.loading.errors import DataError
from libai.data.loading.sampling import SampleRandom

#: draws of a sample that augmentation does not use
_FIRST_DRAW = 16


class MixedImages:
    """A training dataset whose images are mixed; its labels become float32 `(B, num_classes)`.

    Args:
        dataset: gives `images` `(B, C, H, W)` and `labels` `(B,)`; its `augment_batch` is applied to what was mixed.
        num_classes: default, the attribute of `dataset`.
        mixup: alpha of the beta distribution of shares (Zhang et al. 2018); 0: no mixup.
        cutmix: the same for a rectangle that is replaced (Yun et al. 2019); 0: no CutMix. With both, each sample is
            mixed in one of the two ways, by chance.
    """

    def __init__(self, dataset: Any, *, num_classes: int | None = None, mixup: float = 0.2, cutmix: float = 1.0):
        if mixup < 0 or cutmix < 0 or not mixup + cutmix:
            raise DataError(f"mixup={mixup} and cutmix={cutmix}: both are 0 or more, and one of them is above 0.")
        self.dataset = as_dataset(dataset)
        self.num_classes: Any = num_classes or getattr(self.dataset, "num_classes", None)
        if not self.num_classes:
            raise DataError(f"{type(self.dataset).__name__} does not say how many classes it has: give num_classes.")
        self._shares = {name: _beta_quantiles(a) for name, a in (("mixup", mixup), ("cutmix", cutmix)) if a}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.dataset[index]

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples as they are."""
        return read_rows(self.dataset, indices)

    def augment_batch(self, batch: dict[str, np.ndarray], random: SampleRandom) -> dict[str, np.ndarray]:
        """Called by the train loader."""
        other, kind, share, row, column = random.uniform(_FIRST_DRAW + 5)[:, _FIRST_DRAW:].T
        others = self.get_batch((other * len(self)).astype(np.int64))
        is_cut = np.full(len(kind), "cutmix" in self._shares) if len(self._shares) == 1 else kind < 0.5
        kept = np.zeros(len(share))
        for name, chosen in (("mixup", ~is_cut), ("cutmix", is_cut)):
            if chosen.any():
                grid = self._shares[name]
                kept[chosen] = np.interp(share[chosen], np.linspace(0, 1, len(grid)), grid)
        weights = _kept_pixels(batch["images"].shape[2:], is_cut, kept, row, column).astype(np.float32)
        images = batch["images"] * weights + np.asarray(others["images"], np.float32) * (1 - weights)
        share_kept = weights.mean(axis=(1, 2, 3))[:, None]
        classes = np.eye(self.num_classes, dtype=np.float32)
        labels = classes[batch["labels"]] * share_kept + classes[others["labels"]] * (1 - share_kept)
        mixed = {**batch, "images": images.astype(np.float32), "labels": labels.astype(np.float32)}
        return self.dataset.augment_batch(mixed, random) if hasattr(self.dataset, "augment_batch") else mixed


def _kept_pixels(
    size: tuple[int, ...], is_cut: np.ndarray, kept: np.ndarray, row: np.ndarray, column: np.ndarray
) -> np.ndarray:
    """How much of each pixel stays, `(B, 1, H, W)`: everywhere the share, or 0 in a rectangle and 1 around it."""
    inside = np.ones((len(kept), *size), bool)
    for axis, (length, centre) in enumerate(zip(size, (row, column))):
        half = np.sqrt(1 - kept) * length / 2
        place = np.arange(length)[None] + 0.5
        within = abs(place - (centre * length)[:, None]) < half[:, None]
        inside &= within[:, :, None] if axis == 0 else within[:, None, :]
    return np.where(is_cut[:, None, None], ~inside, kept[:, None, None])[:, None]


def _beta_quantiles(alpha: float) -> np.ndarray:
    """The beta distribution, as values at equally spaced probabilities."""
    return np.sort(np.random.default_rng(0).beta(alpha, alpha, 20001))
