"""The container, held against the safetensors package in both directions, and against hostile headers."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from libai import checkpoint
from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.reader import open_safetensors
from libai.checkpoint.safetensors_format import DTYPES, TensorSpec, build_header, from_raw, read_header, to_raw

ARRAYS = {
    dtype: np.arange(6).reshape(2, 3).astype(numpy_dtype)
    for dtype, (_, numpy_dtype) in DTYPES.items()
    if dtype != "bfloat16"
} | {"scalar": np.array(3.5), "empty": np.zeros((0, 4), np.float32), "name with . and ü": np.ones(3)}


def test_the_safetensors_package_reads_what_we_write(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"model": ARRAYS}, {})
    loaded = load_file(path / "model.safetensors")
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array), name


def test_we_read_what_the_safetensors_package_writes(tmp_path):
    save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"any": "text"})
    loaded = open_safetensors(tmp_path / "x.safetensors")
    assert set(loaded) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array), name


def test_bfloat16_is_written_as_such(tmp_path):
    from libai.checkpoint.shards import Entry

    values = np.array([1.5, -2.25, 3e38], np.float32)
    entry = Entry(TensorSpec("bfloat16", (3,)), lambda: values)
    path = checkpoint.save(tmp_path, 1, {"model": {"x": entry}}, {})
    with safe_open(path / "model.safetensors", "np") as file:
        assert file.get_slice("x").get_dtype() == "BF16"
    read = checkpoint.load(path).tensors["model"]["x"]
    assert read.dtype == np.float32 and np.array_equal(read[:2], values[:2])
    assert abs(read[2] / values[2] - 1) <= 2**-8  # half a unit in the last of 8 significant bits


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_to_the_nearest(values):
    array = np.array(values, np.float32)
    raw = to_raw(array, "bfloat16")
    rounded = from_raw(raw, "bfloat16")
    assert np.array_equal(np.isnan(rounded), np.isnan(array))
    finite = np.isfinite(rounded) & np.isfinite(array)
    neighbours = from_raw(np.stack([raw - 1, raw + 1]).astype(np.uint16), "bfloat16")[:, finite].astype(np.float64)
    exact = array[finite].astype(np.float64)
    distance = np.abs(rounded[finite] - exact)
    for neighbour in neighbours:
        is_number = np.isfinite(neighbour)
        assert (distance[is_number] <= np.abs(neighbour - exact)[is_number]).all()
    assert np.array_equal(to_raw(rounded, "bfloat16")[~np.isnan(rounded)], raw[~np.isnan(rounded)])  # exact ones stay


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty file": b"",
    "only a length": (8).to_bytes(8, "little"),
    "length beyond the file": _file({}, length=10**6),
    "absurd length": _file({}, length=2**63),
    "header is a list": _file([]),
    "header is not JSON": _file(b"cos\nsystem\n(S'true'\ntR."),
    "NaN": _file(b'{"a": NaN}'),
    "duplicate names": _file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"ab",
    ),
    "nested": _file(b"[" * 50_000 + b"]" * 50_000),
    "offset outside": _file({"a": _entry([1], [0, 4])}, b""),
    "offset does not begin at 0": _file({"a": _entry([1], [4, 8])}, b"12345678"),
    "overlap": _file({"a": _entry([2], [0, 8]), "b": _entry([2], [4, 12])}, b"0" * 12),
    "gap": _file({"a": _entry([1], [0, 4]), "b": _entry([1], [8, 12])}, b"0" * 12),
    "end before begin": _file({"a": _entry([1], [4, 0])}, b"0000"),
    "negative offset": _file({"a": _entry([1], [-4, 0])}, b"0000"),
    "data after the last tensor": _file({"a": _entry([1], [0, 4])}, b"0000 and a payload"),
    "size does not follow from the shape": _file({"a": _entry([3], [0, 4])}, b"0000"),
    "absurd shape": _file({"a": _entry([2**62, 2**62], [0, 4])}, b"0000"),
    "absurd shape without data": _file({"a": _entry([0, 2**62, 2**62], [0, 0])}),
    "too many dimensions": _file({"a": _entry([1] * 40, [0, 4])}, b"0000"),
    "negative dimension": _file({"a": _entry([-1], [0, 4])}, b"0000"),
    "shape of text": _file({"a": _entry("12", [0, 4])}, b"0000"),
    "bool dimension": _file({"a": _entry([True], [0, 4])}, b"0000"),
    "float offset": _file({"a": _entry([1], [0.0, 4.0])}, b"0000"),
    "unknown dtype": _file({"a": _entry([1], [0, 4], "PICKLE")}, b"0000"),
    "dtype is a list": _file({"a": _entry([1], [0, 4], ["F32"])}, b"0000"),
    "extra field": _file({"a": {**_entry([1], [0, 4]), "x": 1}}, b"0000"),
    "entry is text": _file({"a": "text"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_an_error(name, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match="x.safetensors"):
        open_safetensors(path)


def test_control_the_same_reader_takes_a_good_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(_file({"a": _entry([1], [0, 4]), "b": _entry([], [4, 8])}, np.array([1, 2], "<f4").tobytes()))
    loaded = open_safetensors(path)
    assert loaded["a"].tolist() == [1] and loaded["b"] == 2


@given(st.binary(max_size=200))
def test_no_bytes_at_all_give_another_error(data):
    for content in (data, _file(data)):
        try:
            read_header(io.BytesIO(content), len(content), "file")
        except CheckpointError:
            continue


def test_data_start_aligned():
    for name in ("a", "ab", "abc", "long" * 20):
        assert len(build_header({name: TensorSpec("float32", (2,))})) % 8 == 0
