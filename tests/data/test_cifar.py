"""Generated CIFAR files: both binary layouts, and missing files of every kind."""

import numpy as np
import pytest

from libai.data import CifarDataset, DataError

TRAIN_10 = [f"data_batch_{i}.bin" for i in range(1, 6)]


def write_binary(path, labels, label_bytes=1):
    """Records in which every pixel of image i is i."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = np.zeros((len(labels), label_bytes + 3072), np.uint8)
    records[:, label_bytes - 1] = labels
    records[:, label_bytes:] = np.arange(len(labels))[:, None]
    records.tofile(path)


@pytest.fixture
def cifar10(tmp_path):
    for i, name in enumerate(TRAIN_10):
        write_binary(tmp_path / "cifar-10-batches-bin" / name, [i, i + 5])
    write_binary(tmp_path / "cifar-10-batches-bin" / "test_batch.bin", [9, 8, 7])
    return tmp_path


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read_from_the_folder_or_the_one_above(cifar10, inside):
    train, test = (CifarDataset(cifar10 / inside, split=split) for split in ("train", "test"))
    assert train.labels.tolist() == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]
    assert test.labels.tolist() == [9, 8, 7]
    assert test.images.dtype == np.uint8 and test.images[:, 0, 0, 0].tolist() == [0, 1, 2]


def test_cifar100_takes_the_fine_label(tmp_path):
    write_binary(tmp_path / "train.bin", [99, 3], label_bytes=2)
    dataset = CifarDataset(tmp_path, name="cifar100")
    assert dataset.labels.tolist() == [99, 3] and dataset.num_classes == 100


def test_batches_are_normalised(cifar10):
    dataset = CifarDataset(cifar10, split="test")
    batch = dataset.get_batch(np.array([2, 0]))
    expected = (2 / 255 - np.array([0.4914, 0.4822, 0.4465])) / np.array([0.2470, 0.2435, 0.2616])
    assert batch["images"].dtype == np.float32 and batch["images"].shape == (2, 3, 32, 32)
    assert np.allclose(batch["images"][0, :, 5, 5], expected, atol=1e-6)
    assert np.array_equal(dataset[2]["images"], batch["images"][0])


def test_missing_files_say_where_and_what_to_fetch(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"none, which does not exist.*Download CIFAR.* from https"):
        CifarDataset(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("x")
    monkeypatch.setenv("LIBAI_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"which holds \['notes\.txt'\]"):
        CifarDataset()


def test_labels_of_another_set_are_refused(tmp_path):
    write_binary(tmp_path / "test_batch.bin", [3, 10])
    with pytest.raises(DataError, match="has the label 10: the files are not cifar10"):
        CifarDataset(tmp_path, split="test")


def test_a_truncated_file_is_refused(cifar10):
    path = cifar10 / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a whole number of 3073-byte images"):
        CifarDataset(cifar10, split="test")


@pytest.mark.parametrize(
    "options, text", [({"name": "mnist"}, "cifar100"), ({"split": "val"}, "test")]
)
def test_unknown_names_list_the_known_ones(cifar10, options, text):
    with pytest.raises(DataError, match=text):
        CifarDataset(cifar10, **options)
