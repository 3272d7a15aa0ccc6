"""The handwritten digits as a dataset: scale, split, shifts."""

import hashlib

import numpy as np
import pytest

from libai.data import DataError, DigitsDataset
from libai.data.vision import random_shift, stratified_split


def test_images_are_scaled_and_typed():
    dataset = DigitsDataset()
    batch = dataset.get_batch(np.array([5, 0]))
    assert batch["images"].shape == (2, 1, 8, 8) and batch["images"].dtype == np.float32
    assert batch["labels"].shape == (2,) and batch["labels"].dtype == np.int64
    assert (dataset.images.min(), dataset.images.max()) == (0, 1)
    assert np.array_equal(dataset[5]["images"], batch["images"][0])


def test_the_shipped_arrays_are_those_of_the_uci_test_set():
    images, labels = np.empty((1797, 1, 8, 8), np.float32), np.empty(1797, np.int64)
    splits = [DigitsDataset(split) for split in ("train", "validation")]
    assert sum(map(len, splits)) == 1797, "no image is in both"
    for part in splits:
        images[part.indices], labels[part.indices] = part.images, part.labels
    # of `images * 16` and `target` of sklearn.datasets.load_digits, as bytes
    found = hashlib.sha256(
        (images * 16).astype(np.uint8).tobytes() + labels.astype(np.uint8).tobytes()
    ).hexdigest()
    assert found == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_a_share_that_leaves_a_class_out_is_refused():
    with pytest.raises(DataError, match="gives class 0 0 of its 2 samples"):
        stratified_split(np.array([0, 0, 1, 1]), 0.1, seed=0)


def test_a_shift_moves_every_image_by_its_own_numbers():
    images = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4) + 1
    # With one pixel there are three positions per axis: 0 moves content down or right, the last one
    # up or left.
    moved = random_shift(images, np.array([[0.0, 0.5], [0.99, 0.99]]), max_pixels=1)
    assert np.array_equal(moved[0, :, 1:], images[0, :, :-1]) and not moved[0, :, 0].any()
    assert np.array_equal(moved[1, :, :-1, :-1], images[1, :, 1:, 1:])
    assert not moved[1, :, -1].any() and not moved[1, :, :, -1].any()
