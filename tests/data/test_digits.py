"""The handwritten digits as a dataset: scale, split, augmentation."""

import hashlib

import numpy as np
import pytest

from libai.data import DataError, DigitsDataset
from libai.data.vision.images import stratified_split


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
    found = hashlib.sha256((images * 16).astype(np.uint8).tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    assert found == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_an_unknown_split_is_refused():
    with pytest.raises(DataError, match=r"split='test' .* \['train', 'validation'\]"):
        DigitsDataset("test")


def test_a_share_that_leaves_a_class_out_is_refused():
    with pytest.raises(DataError, match="gives class 0 0 of its 2 samples"):
        stratified_split(np.array([0, 0, 1, 1]), 0.1, seed=0)
