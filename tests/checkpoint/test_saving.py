"""Values that can be saved, values that are refused with a clear message, and the memory that a
save takes.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
from jobs import ROOT

from libai import checkpoint
from libai.checkpoint import CheckpointError, CheckpointWriteError, durable


def test_the_folder_is_laid_out_as_documented(tmp_path):
    tensors = {
        "model": {f"w{i}": np.ones(25, np.float32) for i in range(5)},
        "optimizer": {"m": np.ones(3)},
    }
    path = checkpoint.save(tmp_path, 200, tensors, {"lr": 0.1}, shard_bytes=200)
    assert path == tmp_path / "iter_0000200"
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors",
        "trainer.json",
    ]
    assert json.loads((path / "trainer.json").read_text()) == {"lr": 0.1}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 500
    assert index["weight_map"]["w4"] == "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    "change, expected",
    [
        (
            {"iteration": -1},
            "iteration=-1: the number of a checkpoint must be a whole number of at least 0.",
        ),
        (
            {"state": {"best": float("nan")}},
            "trainer.json: $.best is nan, which JSON cannot represent.",
        ),
        ({"state": [1]}, "state is a list, expected a dict of JSON values."),
        (
            {"tensors": {"model": {"a": 3}}},
            "model: a is a int, expected a oneflow tensor or a numpy array.",
        ),
        (
            {"tensors": {"model": {"a": np.array(["x"])}}},
            "model: a has the dtype <U1, which safetensors does not support.",
        ),
        (
            {"tensors": {"model": {"__metadata__": np.ones(1)}}},
            "a tensor cannot be named '__metadata__'",
        ),
        ({"tensors": {"../model": {"a": np.ones(1)}}}, "a tensor group cannot be named '../model'"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, change, expected):
    arguments = {"iteration": 1, "tensors": {"model": {"a": np.ones(1)}}, "state": {}} | change
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(tmp_path / "root", **arguments)
    assert expected in str(error.value)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("number", range(6))
def test_a_file_with_another_bit_than_the_memory_is_not_kept(tmp_path, monkeypatch, number):
    """Every bit counts: of tensors, headers, the index, the state and the manifest."""
    random = np.random.RandomState(number)
    tensors = {"model": {name: random.randn(7, 9).astype("float32") for name in "abc"}}
    read = []

    def open_flipped(path, mode):
        read.extend([path] * (mode == "rb"))
        if mode == "rb" and len(read) == number + 1:
            values = bytearray(path.read_bytes())
            values[random.randint(len(values))] ^= 1 << random.randint(8)
            path.write_bytes(values)
        return open(path, mode)

    def save():
        return checkpoint.save(tmp_path, 3, tensors, {"lr": 0.1}, shard_bytes=300)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "open", open_flipped, raising=False)
        for _ in range(20):
            read.clear()
            with pytest.raises(CheckpointWriteError, match="has other bytes than the memory"):
                save()
            assert list(tmp_path.iterdir()) == []
    save()  # control: it was the bit


_MEMORY = """
import os, sys, threading
import numpy as np
from libai import checkpoint
from libai.checkpoint.tensor_files import TensorSpec
from libai.checkpoint.shards import Entry

MB = 1_000_000
shard, root, what = 8 * MB, sys.argv[1], sys.argv[2]
peak, done = [0], threading.Event()

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def watch():
    while not done.wait(0.0005):
        peak[0] = max(peak[0], resident_bytes())

def make(i):  # stands for a tensor on a device: in host memory only while it is fetched
    return np.full(MB // 2, i, np.float32)

entries = {f"w{i:02d}": Entry(TensorSpec("float32", (MB // 2,)), lambda i=i: make(i)) for i in range(40)}  # 80 MB
make(0), checkpoint.save(root + "/warm", 1, {"model": {"a": np.ones(3)}}, {})
before = resident_bytes()
threading.Thread(target=watch).start()
try:
    if what == "control":
        everything = [np.array(source.get()) for source in entries.values()]
    path = checkpoint.save(root, 1, {"model": entries}, {}, shard_bytes=shard)
    if what == "load":
        assert checkpoint.verify(path) == []
        assert sum(float(array[0]) for array in checkpoint.load(path).tensors["model"].values()) == sum(range(40))
finally:
    done.set()
print((peak[0] - before) / shard)
"""  # noqa: E501


def _peak_in_shards(tmp_path, what):
    """Return the additional resident memory for saving (and loading) a model of ten shards, in
    units of one shard.
    """
    command = [sys.executable, "-c", _MEMORY, str(tmp_path), what]
    return float(
        subprocess.run(
            command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=60
        ).stdout
    )


@pytest.mark.e2e
@pytest.mark.parametrize("what", ["save", "load"])
def test_memory_is_that_of_one_shard_for_a_model_of_ten(tmp_path, what):
    # saving needs one fetched shard and the buffer of its digest, and loading a single tensor
    assert _peak_in_shards(tmp_path, what) < 1.5


@pytest.mark.e2e
def test_control_the_memory_test_sees_a_model_held_whole(tmp_path):
    assert _peak_in_shards(tmp_path, "control") > 5.0
