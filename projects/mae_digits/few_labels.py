"""A dataset of a few labelled images of handwritten digits."""

from __future__ import annotations

import numpy as np

from libai.data import DigitsDataset


def few_labels(num_per_class: int, seed: int) -> dict[str, np.ndarray]:
    """Return `images` and `labels` of `num_per_class` training images of each digit, chosen by
    `seed`.
    """
    train = DigitsDataset("train")
    order = np.random.default_rng(seed).permutation(len(train))
    chosen = np.concatenate(
        [order[train.labels[order] == digit][:num_per_class] for digit in range(10)]
    )
    return {"images": train.images[chosen], "labels": train.labels[chosen]}
