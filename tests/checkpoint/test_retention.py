"""The newest verified checkpoint is found and never deleted. Pointer files are only hints."""

import json

import numpy as np
import pytest

from libai import checkpoint
from libai.checkpoint import CheckpointError


@pytest.fixture
def root(tmp_path):
    """Checkpoints of iterations 1 to 5."""
    for iteration in range(1, 6):
        checkpoint.save(tmp_path, iteration, {"model": {"a": np.full(3, iteration)}}, {})
    return tmp_path


def _damage(root, iteration):
    file = root / f"iter_{iteration:07d}" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _left(root):
    return [checkpoint.iteration_of(path.name) for path in checkpoint.list_checkpoints(root)]


@pytest.mark.parametrize(
    "arguments, left",
    [
        ({"max_to_keep": 2}, [4, 5]),
        ({"max_to_keep": None}, [1, 2, 3, 4, 5]),
        ({"max_to_keep": 1, "protect": ["iter_0000003"]}, [3, 5]),
    ],
)
def test_prune_keeps_what_was_asked(root, arguments, left):
    deleted = checkpoint.prune(root, **arguments)
    assert _left(root) == left
    assert sorted(path.name for path in root.iterdir()) == [
        f"iter_{iteration:07d}" for iteration in left
    ]
    assert {checkpoint.iteration_of(path.name) for path in deleted} == {1, 2, 3, 4, 5} - set(left)


def test_prune_keeps_the_best(root):
    checkpoint.mark_best(root, root / "iter_0000002", "eval/val/loss", 1.5)
    checkpoint.prune(root, 1)
    assert _left(root) == [2, 5]


def test_prune_keeps_the_last_verified_one_when_all_newer_are_damaged(root):
    _damage(root, 5)
    _damage(root, 4)
    checkpoint.prune(root, 2)
    assert _left(root) == [3, 4, 5]
    assert checkpoint.find_latest(root)[0] == root / "iter_0000003"


def test_prune_deletes_nothing_when_none_verifies(root):
    for iteration in range(1, 6):
        _damage(root, iteration)
    assert checkpoint.prune(root, 1) == []
    assert _left(root) == [1, 2, 3, 4, 5]


def test_the_best_is_remembered_and_replaced(root):
    assert checkpoint.read_best(root) is None
    checkpoint.mark_best(root, root / "iter_0000002", "eval/val/loss", 1.5)
    checkpoint.mark_best(root, root / "iter_0000003", "eval/val/loss", 1.25)
    assert checkpoint.read_best(root) == checkpoint.Best(
        root / "iter_0000003", "eval/val/loss", 1.25
    )
    assert json.loads((root / "best.json").read_text()) == {
        "checkpoint": "iter_0000003",
        "metric": "eval/val/loss",
        "value": 1.25,
    }


@pytest.mark.parametrize(
    "content", ["{}", '{"checkpoint": "../../etc", "value": 1}', "[]", "x", '{"checkpoint": 3}']
)
def test_a_damaged_or_hostile_best_file_is_an_error(root, content):
    (root / "best.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"best\.json"):
        checkpoint.read_best(root)


def test_names_of_checkpoints_are_resolved(root):
    checkpoint.mark_best(root, root / "iter_0000002", "m", 1.5)
    assert checkpoint.resolve(root) == checkpoint.resolve(root / "last") == root / "iter_0000005"
    assert checkpoint.resolve(root / "best") == root / "iter_0000002"
    assert checkpoint.resolve(root / "iter_0000001") == root / "iter_0000001"


def test_what_cannot_be_resolved_is_explained(root):
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.resolve(root / "nowhere")
    with pytest.raises(CheckpointError, match="no best checkpoint is recorded"):
        checkpoint.resolve(root / "best")
    for iteration in range(1, 6):
        _damage(root, iteration)
    with pytest.raises(
        CheckpointError, match=r"contains no valid checkpoint.\n  iter_0000005: .*damaged"
    ):
        checkpoint.resolve(root)
