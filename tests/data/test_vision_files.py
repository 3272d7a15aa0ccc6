"""MNIST files, folders of images, and mixed images."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest

from libai.data import DataError, DigitsDataset, ImageFolderDataset, MixedImages, MnistDataset, build_train_loader
from libai.data.vision.files import MEAN, STD
from libai.data.vision.images import random_resized_crop, resize
from libai.models.blocks.outputs import classification_outputs

PIXELS = np.random.RandomState(0).randint(0, 256, (5, 28, 28)).astype(np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(folder: Path, is_packed: bool) -> Path:
    for name, array in (("train-images-idx3-ubyte", PIXELS), ("train-labels-idx1-ubyte", LABELS)):
        content = idx(array)
        (folder / (f"{name}.gz" if is_packed else name)).write_bytes(gzip.compress(content) if is_packed else content)
    return folder


@pytest.mark.parametrize("is_packed", [False, True])
def test_mnist_is_read_packed_or_not(tmp_path: Path, is_packed: bool) -> None:
    dataset = MnistDataset(mnist(tmp_path, is_packed))
    batch = dataset.get_batch(np.array([4, 0]))
    np.testing.assert_array_equal(batch["labels"], [5, 3])
    np.testing.assert_array_equal(batch["images"][:, 0], PIXELS[[4, 0]] / np.float32(255))
    assert batch["images"].dtype == np.float32 and len(dataset) == 5


def test_mnist_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz was looked for in .*is empty"):
        MnistDataset(tmp_path)
    path = mnist(tmp_path, False) / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="no whole IDX file"):
        MnistDataset(tmp_path)


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    for name, colour, size in (("cat", (255, 0, 0), (40, 20)), ("dog", (0, 0, 255), (16, 30))):
        (tmp_path / name).mkdir()
        image_module.new("RGB", size, colour).save(tmp_path / name / "one.png")
    dataset = ImageFolderDataset(tmp_path, image_size=16)
    assert dataset.classes == ["cat", "dog"] and len(dataset) == 2
    sample = dataset[1]
    assert sample["images"].shape == (3, 16, 16) and sample["labels"] == 1
    np.testing.assert_allclose(sample["images"][:, 8, 8], (np.array([0, 0, 1]) - MEAN) / STD, rtol=1e-5)
    (tmp_path / "dog" / "two.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"two.png is no image"):
        ImageFolderDataset(tmp_path)[2]
    with pytest.raises(DataError, match="no folders of classes"):
        ImageFolderDataset(tmp_path / "cat")


def test_resizing_a_part_follows_pillow() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = np.random.RandomState(0).rand(1, 1, 20, 20).astype(np.float32)
    for size in (9, 20, 37):
        box = (2.0, 5.0, 17.0, 15.0)  # left, top, right, bottom
        found = resize(image, np.array([[[5 / 20, 10 / 20], [2 / 20, 15 / 20]]]), size)
        picture = image_module.fromarray(image[0, 0])
        expected = np.asarray(picture.resize((size, size), image_module.Resampling.BILINEAR, box=box))
        inner = slice(2, -2)  # Pillow does not look beyond the box
        np.testing.assert_allclose(found[0, 0, inner, inner], expected[inner, inner], atol=1e-5)


def test_random_parts_have_the_area_and_ratio_that_were_asked_for() -> None:
    """Of an image whose pixels are their places."""
    rows, columns = np.indices((64, 64), np.float32)
    images = np.broadcast_to(np.stack([rows, columns]), (200, 2, 64, 64))
    uniform = np.random.RandomState(0).rand(200, 4)
    found = random_resized_crop(images, uniform, 32, area=(0.25, 0.5))
    height, width = (np.ptp(found[:, axis], axis=(1, 2)) * 32 / 31 / 64 for axis in (0, 1))
    assert 0.24 < (height * width).min() < 0.3 and 0.45 < (height * width).max() < 0.51
    assert 0.74 < (width / height).min() < 0.8 and 1.25 < (width / height).max() < 1.35


def test_parts_of_a_folder_are_the_same_for_any_ranks_and_workers(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(4):
            pixels = np.random.RandomState(i).randint(0, 256, (20, 24, 3)).astype(np.uint8)
            image_module.fromarray(pixels).save(tmp_path / name / f"{i}.png")

    def images(num_ranks: int, num_workers: int = 0) -> np.ndarray:
        options = {"micro_batch_size": 4 // num_ranks, "num_data_ranks": num_ranks, "seed": 3}
        dataset = ImageFolderDataset(tmp_path, image_size=8, augment=True)
        workers = {"num_workers": num_workers} if num_workers else {"prefetch": 0}
        loaders = [build_train_loader(dataset, data_rank=rank, **options, **workers) for rank in range(num_ranks)]
        streams = [iter(loader) for loader in loaders]
        return np.concatenate([next(stream)["images"] for _ in range(3) for stream in streams])

    one = images(1)
    assert one.shape == (12, 3, 8, 8)
    np.testing.assert_array_equal(images(2), one)
    np.testing.assert_array_equal(images(1, num_workers=1), one)
    with pytest.raises(DataError, match="min_area=0 is a share"):
        ImageFolderDataset(tmp_path, min_area=0)


def batches_of(num_ranks: int, consumed: int = 0, **mixing: float) -> dict[str, np.ndarray]:
    """Two global batches of eight samples, put together from the ranks."""
    parts: list[list[dict[str, np.ndarray]]] = []
    for rank in range(num_ranks):
        loader = build_train_loader(
            MixedImages(DigitsDataset(augment=True), **mixing),
            micro_batch_size=8 // num_ranks,
            data_rank=rank,
            num_data_ranks=num_ranks,
            seed=3,
            prefetch=0,
        )
        batches = iter(loader)
        parts.append([next(batches) for _ in range(2)])
    return {
        name: np.concatenate([parts[rank][step][name] for step in range(2) for rank in range(num_ranks)])
        for name in ("images", "labels")
    }


@pytest.mark.parametrize("mixing", [{"cutmix": 0.0}, {"mixup": 0.0}, {}], ids=["mixup", "cutmix", "both"])
def test_mixing_is_the_same_on_any_number_of_ranks(mixing: dict[str, float]) -> None:
    one, two = batches_of(1, **mixing), batches_of(2, **mixing)
    for name, array in one.items():
        np.testing.assert_array_equal(two[name], array)
    np.testing.assert_allclose(one["labels"].sum(axis=1), 1, rtol=1e-6)
    assert one["labels"].shape == (16, 10) and (one["labels"].max(axis=1) < 1).any()


def test_shares_of_labels_are_those_of_pixels() -> None:
    """With all pixels of a sample equal to its class, an image's mean is the mean of its labels."""
    pixels = np.broadcast_to(np.arange(4.0)[:, None, None, None], (4, 1, 8, 8))

    class Flat:
        num_classes = 4

        def __len__(self) -> int:
            return 4

        def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"images": pixels[indices], "labels": indices}

    batch = next(iter(build_train_loader(MixedImages(Flat()), micro_batch_size=64, seed=1, prefetch=0)))
    np.testing.assert_allclose(batch["images"].mean(axis=(1, 2, 3)), batch["labels"] @ np.arange(4.0), atol=1e-5)
    cut = [len(np.unique(image)) == 2 for image in batch["images"]]
    assert 0 < sum(cut) < 64  # a rectangle of another class, or one share everywhere


def test_impossible_mixing_is_refused() -> None:
    with pytest.raises(DataError, match="one of them is above 0"):
        MixedImages(DigitsDataset(), mixup=0.0, cutmix=0.0)
    with pytest.raises(DataError, match="give num_classes"):
        MixedImages({"images": np.zeros((2, 1, 4, 4)), "labels": np.arange(2)})


def test_the_loss_takes_shares_of_classes() -> None:
    logits = flow.tensor(np.random.RandomState(0).randn(3, 4).astype(np.float32))
    labels = flow.tensor([1, 0, 3])
    whole = classification_outputs(logits, labels, True)
    shares = classification_outputs(logits, flow.tensor(np.eye(4, dtype=np.float32)[[1, 0, 3]]), True)
    for group in ("losses", "metrics"):
        for name, value in whole[group].items():
            assert shares[group][name].item() == pytest.approx(value.item(), rel=1e-6)
