"""MNIST files and folders of images."""

import gzip
import struct

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from libai.data import DataError, ImageFolderDataset, MnistDataset, build_train_loader
from libai.data.vision import MEAN, STD, resize

PIXELS = np.random.RandomState(0).randint(0, 256, (5, 28, 28)).astype(np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def mnist(folder, is_packed):
    for name, array in (("train-images-idx3-ubyte", PIXELS), ("train-labels-idx1-ubyte", LABELS)):
        content = idx(array)
        (folder / (f"{name}.gz" if is_packed else name)).write_bytes(
            gzip.compress(content) if is_packed else content
        )
    return folder


@pytest.mark.parametrize("is_packed", [False, True])
def test_mnist_is_read_packed_or_not(tmp_path, is_packed):
    dataset = MnistDataset(mnist(tmp_path, is_packed))
    batch = dataset.get_batch(np.array([4, 0]))
    assert_array_equal(batch["labels"], [5, 3])
    assert_array_equal(batch["images"][:, 0], PIXELS[[4, 0]] / np.float32(255))
    assert batch["images"].dtype == np.float32 and len(dataset) == 5


def test_mnist_says_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz in .*is empty"):
        MnistDataset(tmp_path)
    path = mnist(tmp_path, False) / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a complete IDX file"):
        MnistDataset(tmp_path)


def test_a_folder_for_each_class(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    for name, colour, size in (("cat", (255, 0, 0), (40, 20)), ("dog", (0, 0, 255), (16, 30))):
        (tmp_path / name).mkdir()
        image_module.new("RGB", size, colour).save(tmp_path / name / "one.png")
    dataset = ImageFolderDataset(tmp_path, image_size=16)
    assert dataset.classes == ["cat", "dog"] and len(dataset) == 2
    sample = dataset[1]
    assert sample["images"].shape == (3, 16, 16) and sample["labels"] == 1
    assert_allclose(sample["images"][:, 8, 8], (np.array([0, 0, 1]) - MEAN) / STD, rtol=1e-5)
    augmented = ImageFolderDataset(tmp_path, image_size=8, augment=True)
    options = {"micro_batch_size": 2, "seed": 3, "prefetch": 0}
    whole = next(build_train_loader(augmented, **options))["images"]
    options.update(micro_batch_size=1, num_data_ranks=2)
    parts = [
        next(build_train_loader(augmented, data_rank=rank, **options))["images"] for rank in (0, 1)
    ]
    assert whole.shape == (2, 3, 8, 8)
    assert_array_equal(np.concatenate(parts), whole)
    (tmp_path / "dog" / "two.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"two.png is not an image"):
        ImageFolderDataset(tmp_path)[2]
    with pytest.raises(DataError, match="min_area=0.*0 < min_area <= 1"):
        ImageFolderDataset(tmp_path, min_area=0)
    with pytest.raises(DataError, match="one folder of images per class"):
        ImageFolderDataset(tmp_path / "cat")


def test_resizing_a_part_follows_pillow():
    image_module = pytest.importorskip("PIL.Image")
    image = np.random.RandomState(0).rand(1, 1, 20, 20).astype(np.float32)
    for size in (9, 20, 37):
        box = (2.0, 5.0, 17.0, 15.0)  # left, top, right, bottom
        found = resize(image, np.array([[[5 / 20, 10 / 20], [2 / 20, 15 / 20]]]), size)
        picture = image_module.fromarray(image[0, 0])
        expected = np.asarray(
            picture.resize((size, size), image_module.Resampling.BILINEAR, box=box)
        )
        inner = slice(2, -2)  # Pillow does not look beyond the box
        assert_allclose(found[0, 0, inner, inner], expected[inner, inner], atol=1e-5)
