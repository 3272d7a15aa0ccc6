"""A full disk, a lost permission or two savers in one folder cause a clear error or no harm, and
never damage.
"""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from libai import checkpoint
from libai.checkpoint import CheckpointError, durable, saving

TENSORS = {"model": {f"w{i}": np.full(1000, i, np.float32) for i in range(10)}}


class _Usage:
    def __init__(self, free):
        self.free = free


@pytest.fixture
def root(tmp_path):
    """Create a folder with one valid checkpoint of iteration 1."""
    checkpoint.save(tmp_path, 1, TENSORS, {"n": 1})
    return tmp_path


def _assert_untouched(root):
    assert [path.name for path in root.iterdir()] == ["iter_0000001"]
    assert checkpoint.verify(root / "iter_0000001") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("iteration", [1, 2])
def test_every_failing_call_gives_a_clear_error_and_no_damage(
    root, tmp_path_factory, monkeypatch, code, iteration
):
    calls = [0]
    fail_at = [10**9]

    def counted(function):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] == fail_at[0]:
                raise OSError(code, os.strerror(code), str(root))
            return function(*args, **kwargs)

        return call

    elsewhere = shutil.copytree(root, tmp_path_factory.mktemp("elsewhere") / "root")
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_tensors", counted(saving.write_tensors))
        patch.setattr(durable.os, "fsync", counted(os.fsync))
        patch.setattr(durable.os, "rename", counted(os.rename))
        patch.setattr(saving, "write_file", counted(saving.write_file))
        patch.setattr(durable.Path, "mkdir", counted(Path.mkdir))
        calls[0] = 0
        checkpoint.save(elsewhere, iteration, TENSORS, {})
        total = calls[0]
        for point in range(1, total):  # number `total` is the fsync of the root, after the rename
            calls[0], fail_at[0] = 0, point
            with pytest.raises(CheckpointError) as error:
                checkpoint.save(root, iteration, TENSORS, {"n": 2})
            assert os.strerror(code) in str(error.value)
            assert f"checkpoint iter_000000{iteration} (39.07 KiB) could not be written" in str(
                error.value
            )
            assert "Earlier checkpoints" in str(error.value)
            _assert_untouched(root)
    assert total == {1: 11, 2: 10}[iteration]  # a replaced checkpoint is first moved aside
    checkpoint.save(
        root, iteration, TENSORS, {"n": 2}
    )  # once there is free space again, saving works
    assert checkpoint.load(root / f"iter_000000{iteration}").state == {"n": 2}


def test_too_little_space_is_said_before_anything_is_written(root, monkeypatch):
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: _Usage(10_000))
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(root, 2, TENSORS, {})
    assert "checkpoint iter_0000002 needs 39.06 KiB, but" in str(error.value)
    assert "has only 9.766 KiB free. Nothing was written." in str(error.value)
    _assert_untouched(root)
