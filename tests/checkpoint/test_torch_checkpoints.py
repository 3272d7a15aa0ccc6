"""Files of `torch.save` are read without PyTorch. Broken and malicious ones are refused, and
nothing in them is executed.

PyTorch 2.13 wrote the files `torch_files/*.pt`; `pickles.txt` has pickles made by hand.
"""

import ast
import re
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from oneflow import nn

from libai import checkpoint
from libai.checkpoint import CheckpointError
from libai.checkpoint.torch_zip import open_torch

FILES = Path(__file__).with_name("torch_files")
RANGE = np.arange(12.0)
WEIGHT, BIAS = np.arange(6.0).reshape(2, 3), np.array([6.0, 7.0])
VALUES = {
    "plain": RANGE.reshape(3, 4),
    "bfloat16": RANGE,
    "half": RANGE,
    "long": RANGE,
    "int": RANGE,
    "short": RANGE,
    "char": RANGE,
    "byte": RANGE,
    "bool": RANGE > 5,
    "first": RANGE[:4],
    "last": RANGE[8:],
    "transposed": RANGE.reshape(3, 4).T,
    "every_second": RANGE[::2],
    "scalar": np.array(7.0),
    "bfloat16_scalar": np.array(7.0),
    "empty": np.empty((0, 3)),
    "parameter": RANGE[1:3],
}
#: instructions of pickles, by what is wrong with them
PICKLES = {
    what: ast.literal_eval(pickled)
    for what, pickled in re.findall("(.*?): (b.*)", (FILES / "pickles.txt").read_text())
}
GOOD = PICKLES["is read"]
STORAGE = np.arange(4, dtype=np.float32).tobytes()


def test_values_of_all_layouts_and_types_are_equal():
    tensors = checkpoint.open_weights(FILES / "values.pt")
    assert sorted(tensors) == sorted(VALUES)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)
        assert tensors[name].shape == tensors.specs[name].shape == value.shape
    dtypes = [spec.dtype for spec in tensors.specs.values()]
    assert len(set(dtypes)) == 10 and dtypes.count("bfloat16") == 2


class Task(nn.Module):
    """A model whose names begin with `module.`, as those of `TorchTask`."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 2)


@pytest.mark.parametrize("file", ["plain.pt", "protocol4.pt", "training.pt"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), Task])
def test_wrappers_are_removed(file, make):
    """`training.pt` has the weights as `model.module.weight`, next to an optimizer."""
    model = make()
    report = checkpoint.load_weights(FILES / file, model)
    assert report.is_exact and len(report.loaded) == 2
    linear = getattr(model, "module", model)
    np.testing.assert_array_equal(linear.weight.numpy(), WEIGHT)
    np.testing.assert_array_equal(linear.bias.numpy(), BIAS)


def test_one_of_two_items_is_chosen_by_the_user(tmp_path):
    path = write(tmp_path / "two.pt", PICKLES["is read, with two items"])
    model = nn.Linear(2, 1, bias=False)
    with pytest.raises(CheckpointError, match=r"unexpected: `ema\.weight`, `model\.weight`"):
        checkpoint.load_weights(path, model)
    checkpoint.load_weights(path, model, [[r"^ema\..*", ""]])
    assert model.weight.numpy().tolist() == [[1, 2]]


def write(path, pickled, compression=zipfile.ZIP_STORED, storage=STORAGE):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("file/data.pkl", b"\x80\x02" + pickled + b".")
        file.writestr("file/data/0", storage)
    return path


@pytest.mark.parametrize("what", [what for what in PICKLES if what.startswith("is read")][:3])
def test_a_pickle_made_by_hand_is_read(what, tmp_path):
    """Negative control: those below differ in one thing."""
    [array] = open_torch(write(tmp_path / "good.pt", PICKLES[what])).values()
    assert array.tolist() == [[0, 1]]


def refusal(path, folder):
    """Return the reason for which `path`, the only file in a folder, is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as error:
            checkpoint.load_weights(path, nn.Linear(2, 1, bias=False))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert [path] == list(folder.iterdir())  # the calls in these files would write another one
    return str(error.value)


@pytest.mark.parametrize("what", [what for what in PICKLES if not what.startswith("is read")])
def test_a_broken_or_malicious_pickle_is_refused(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "file.pt" in refusal(write(tmp_path / "file.pt", PICKLES[what]), tmp_path)


def test_endless_nesting_is_refused(tmp_path):
    nested = b"}" + b"X\1\0\0\0a}" * 100_000 + b"s" * 100_000
    assert "more than 500 characters" in refusal(write(tmp_path / "file.pt", nested), tmp_path)


@pytest.mark.parametrize("size", [16, 2**28])
def test_compressed_data_is_refused(size, tmp_path):
    path = write(tmp_path / "bomb.pt", GOOD, zipfile.ZIP_DEFLATED, bytes(size))
    assert "compressed" in refusal(path, tmp_path)


@pytest.mark.parametrize(
    "old, new, reason",
    [
        (b"/data.pkl", b"/data.pkk", "PyTorch 1.6"),
        (b"data/0", b"data.0", "outside of its data"),
        (STORAGE, bytes(16), "Bad CRC"),
        (b"\x10\0\0\0" * 2, b"\x10\0\0\0\x40\0\0\0", "wrong sizes"),
        (b"\x10\0\0\0" * 2, b"\xff\xff\xff\x0f" * 2, "wrong sizes"),
    ],
)
def test_a_changed_archive_is_refused(old, new, reason, tmp_path):
    path = write(tmp_path / "file.pt", GOOD)
    path.write_bytes(path.read_bytes().replace(old, new))
    assert reason in refusal(path, tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK",
        b"some text, not weights",
        (FILES / "plain.pt").read_bytes()[:-30],
        (FILES / "plain.pt").read_bytes()[:700],
        (FILES / "legacy.pt").read_bytes(),
        b"\x80\x02cposix\nsystem\n(X\t\0\0\0touch rantR.",
    ],
)
def test_other_files_are_refused(data, tmp_path, monkeypatch):
    """They are empty, truncated, of PyTorch before 1.6, or a pickle that calls `os.system`."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    assert "file.pt" in refusal(path, tmp_path)
