"""Tensor files are exact for every dtype, readable by other libraries, and refused if the header is
invalid.
"""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from libai import checkpoint
from libai.checkpoint import durable
from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.reader import open_safetensors
from libai.checkpoint.tensor_files import CODES, HUGGING_FACE, read_slots, write_tensors

NUMBERS = np.arange(6).reshape(2, 3)
ARRAYS = {dtype: NUMBERS.astype(dtype) for dtype in CODES if dtype != "bfloat16"}
ARRAYS |= {
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 4), np.float32),
    "name with . and ü": np.ones(3),
}


def test_every_dtype_is_written_for_others_and_read_from_them(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"model": ARRAYS}, {})
    save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"any": "text"})
    loaded, own = (
        load_file(path / "model.safetensors"),
        open_safetensors(tmp_path / "x.safetensors"),
    )
    assert loaded.keys() == own.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        for read in (loaded[name], own[name]):
            assert read.dtype == array.dtype and np.array_equal(read, array), name
    save_file(ARRAYS, tmp_path / "x.safetensors", metadata=dict(HUGGING_FACE))
    written = (path / "model.safetensors").read_bytes()
    assert written == (tmp_path / "x.safetensors").read_bytes()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_permissions_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_tensors(tmp_path / "x.safetensors", {}, {})
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_failed_export_leaves_no_file(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, 1, {"model": {"x": np.ones(3)}}, {})

    def fail(path, mode):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(durable, "open", fail, raising=False)
        with pytest.raises(CheckpointError, match="x.safetensors could not be written: No space"):
            checkpoint.convert(checkpoint.load(path), tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == [path.name]
    checkpoint.convert(checkpoint.load(path), tmp_path / "x.safetensors")  # negative control


def _file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty file": b"",
    "length beyond the file": _file({}, length=10**6),
    "NaN": _file(b'{"a": NaN}'),
    "duplicate names": _file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"ab",
    ),
    "data after the last tensor": _file({"a": _entry([1], [0, 4])}, b"0000 and a payload"),
    "dtype that numpy lacks": _file({"a": _entry([1], [0, 1], "F8_E4M3")}, b"0"),
    "too many dimensions": _file({"a": _entry([1] * 40, [0, 4])}, b"0000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_an_error(name, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match="x.safetensors"):
        open_safetensors(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bytes")


@given(st.binary(max_size=200))
def test_no_bytes_at_all_give_another_error(folder, data):
    for content in (data, _file(data)):
        (folder / "x.safetensors").write_bytes(content)
        try:
            read_slots(folder / "x.safetensors")
        except CheckpointError:
            continue


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="x.safetensors is not a regular file"):
        open_safetensors(tmp_path / "x.safetensors")
