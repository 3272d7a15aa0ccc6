"""Damage of every kind is found; nothing is executed; nothing outside the checkpoint is read."""

import hashlib
import itertools
import json
import random

import numpy as np
import pytest

from libai import checkpoint
from libai.checkpoint import CheckpointError
from libai.checkpoint.strict_json import dump_json

TENSORS = {
    "model": {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5),
        "c": np.array(2.5),
    },
    "optimizer": {"a.weight/exp_avg": np.ones((3, 4), np.float32)},
}
STATE = {"trainer": {"iter": 200}, "rates": [0.1, 0.2], "best": None}


@pytest.fixture
def path(tmp_path):
    """A valid checkpoint of iteration 200 in several shards."""
    return checkpoint.save(tmp_path / "root", 200, TENSORS, STATE, shard_bytes=50)


def _rewrite_manifest(path, change):
    """Change the manifest and correct its digest."""
    body = json.loads((path / "manifest.json").read_text())
    body.pop("sha256_of_the_rest")
    change(body)
    body["sha256_of_the_rest"] = hashlib.sha256(dump_json(body, "manifest")).hexdigest()
    (path / "manifest.json").write_text(json.dumps(body))


def test_what_was_saved_comes_back(path):
    loaded = checkpoint.load(path)
    assert loaded.iteration == 200
    assert loaded.state == STATE
    assert checkpoint.verify(path) == []
    for group, tensors in TENSORS.items():
        assert list(loaded.tensors[group]) == sorted(tensors)
        for name, array in tensors.items():
            read = loaded.tensors[group][name]
            assert (
                read.dtype == array.dtype
                and read.shape == array.shape
                and np.array_equal(read, array)
            )
            assert read.flags.writeable


@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_bit_is_found(path, seed):
    rng = random.Random(seed)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for _ in range(15):
            position, bit = rng.randrange(len(good)), 1 << rng.randrange(8)
            file.write_bytes(good[:position] + bytes([good[position] ^ bit]) + good[position + 1 :])
            assert checkpoint.verify(path), f"{file.name}: bit {bit} of byte {position}"
        file.write_bytes(good)
    assert checkpoint.verify(path) == []  # control: it was the flips


def test_files_that_are_missing_or_swapped_are_found(path):
    files = sorted(path.iterdir())
    for file, other in itertools.pairwise([*files, files[0]]):
        good = file.read_bytes()
        file.write_bytes(other.read_bytes())
        assert checkpoint.verify(path), f"{file.name} with the content of {other.name}"
        file.unlink()
        assert checkpoint.verify(path), f"without {file.name}"
        file.write_bytes(good)
    assert checkpoint.verify(path) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_any_truncated_file_is_found_without_reading_data(path, share):
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        file.write_bytes(good[: int(len(good) * share)])
        assert checkpoint.verify(path, deep=False), file.name
        with pytest.raises(CheckpointError):
            checkpoint.load(path)
        file.write_bytes(good)


def test_damage_after_verification_is_found_when_a_tensor_is_read(path):
    loaded = checkpoint.load(path)
    before = loaded.tensors["model"]["b"]
    for file in path.glob("model*.safetensors"):
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="do not match the digest"):
        loaded.tensors["model"]["b"]
    assert np.array_equal(before, TENSORS["model"]["b"])


def test_a_folder_replaced_while_it_is_read_gives_no_mixture(path):
    loaded = checkpoint.load(path)
    checkpoint.save(
        path.parent,
        200,
        {"model": {n: a + 1 for n, a in TENSORS["model"].items()}},
        STATE,
        shard_bytes=50,
    )
    with pytest.raises(CheckpointError):
        loaded.tensors["model"]["a.weight"]


@pytest.mark.parametrize("change", ["missing", "added", "moved"])
def test_an_index_and_its_shards_agree(path, change):
    index = path / "model.safetensors.index.json"
    assert len(checkpoint.open_weights(index)) == 3  # negative control
    content = json.loads(index.read_text())
    places = content["weight_map"]
    file = places.pop("b")
    if change == "added":
        places |= {"b": file, "d": file}
    elif change == "moved":
        places["b"] = next(other for other in places.values() if other != file)
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="and its shards disagree on `[bd]`"):
        checkpoint.open_weights(index)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "trainer.json", "anything"])
@pytest.mark.parametrize("way", ["..", "absolute", "folder", "link"])
def test_a_manifest_cannot_lead_out_of_the_folder(path, name, way):
    """Not even to compare sizes and digests, which would appear in the error."""
    outside = path.parent / "outside"
    (path / "optimizer.safetensors").rename(outside)
    listed = {
        "..": "../outside",
        "absolute": str(outside),
        "folder": "..",
        "link": name,
    }[way]
    if way == "link":
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(outside)

    def change(body):
        body["files"][listed] = body["files"].pop("optimizer.safetensors")

    _rewrite_manifest(path, change)
    with pytest.raises(CheckpointError, match="only files in its own folder are read"):
        checkpoint.load(path)
    problems = checkpoint.verify(path)
    assert "only files in its own folder are read" in problems[0]
    assert not any("bytes" in problem for problem in problems)


def test_a_link_inside_the_folder_is_read(path):
    """Negative control of the link above."""
    (path / "optimizer.safetensors").rename(path / "real")
    (path / "optimizer.safetensors").symlink_to("real")
    assert checkpoint.verify(path) == []


HOSTILE_MANIFESTS = {
    "other format": (lambda m: m.update(format="x"), "'format': 'x'"),
    "no files": (lambda m: m.pop("files"), "is incomplete"),
    "other iteration": (lambda m: m.update(iteration=201), "under another name"),
    "size is absurd": (lambda m: m["files"]["trainer.json"].update(bytes=10**30), "were written"),
    "unlisted shard": (lambda m: m["files"].update(x=m["files"]["trainer.json"]), "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_an_error(path, name):
    change, expected = HOSTILE_MANIFESTS[name]
    _rewrite_manifest(path, change)
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.load(path)
    assert checkpoint.verify(path)
