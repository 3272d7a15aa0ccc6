"""After kill -9 at any write point, a checkpoint that can be resumed is always complete."""

import shutil
import signal
import subprocess
import sys

import pytest
from jobs import ROOT

from libai import checkpoint

# Reads jobs `root program argument`, runs each in a forked child and prints how it ended. A new
# interpreter for each of the more than one hundred savers would take a minute.
_SERVER = """
import os, shutil, signal, sys
from contextlib import contextmanager
from pathlib import Path
import numpy as np
from libai import checkpoint
from libai.checkpoint import saving

passed = []

def kill_at_call(number):
    # before the numbered call that makes, writes, syncs, renames or deletes something
    def counted(function):
        def call(*args, **kwargs):
            passed.append(function.__name__)
            if len(passed) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    places = [(os, "fsync"), (os, "rename"), (shutil, "rmtree"), (saving, "write_tensors")]
    for owner, name in [*places, (Path, "mkdir"), (saving, "write_file")]:
        setattr(owner, name, counted(getattr(owner, name)))

def save(root, iteration, value):
    tensors = {"model": {f"w{i}": np.full(20, value) for i in range(4)}, "optimizer": {"m": np.full(9, value)}}
    checkpoint.save(root, iteration, tensors, {"value": value}, shard_bytes=400)

def one_round(root, kill_at):
    # iteration 2 is new, iteration 1 is saved again over the existing one, then the older of the two goes
    kill_at_call(kill_at)
    save(root, 2, 2.0)
    save(root, 1, 1.5)
    checkpoint.prune(root, 1)
    Path(root + ".count").write_text(str(len(passed)))

def one_save(root, iteration):
    save(root, iteration, float(iteration))

def naive_save(root, kill_at):
    # a writer that fills the final folder directly
    @contextmanager
    def fill_final(final):
        final.mkdir()
        yield final
    saving.new_folder = fill_final
    kill_at_call(kill_at)
    save(root, 2, 2.0)

for line in sys.stdin:
    root, program, argument = line.split()
    child = os.fork()
    if child == 0:
        globals()[program](root, int(argument))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""  # noqa: E501


@pytest.fixture(scope="module")
def saver():
    """Let the server run a program in a separate process, and return its exit code."""
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def run(root, program, argument):
            assert server.stdin is not None and server.stdout is not None
            print(root, program, argument, file=server.stdin, flush=True)
            return int(server.stdout.readline())

        yield run


@pytest.fixture
def pristine(tmp_path, saver):
    """Create a folder with checkpoints of the iterations 0 and 1."""
    for iteration in (0, 1):
        assert saver(tmp_path / "pristine", "one_save", iteration) == 0
    return tmp_path / "pristine"


def _assert_whole(path):
    """Assert that the tensors and the state of a checkpoint come from the same save."""
    loaded = checkpoint.load(path)
    assert checkpoint.verify(path) == []
    for group in loaded.tensors.values():
        for array in group.values():
            assert (array == loaded.state["value"]).all()


def _assert_all_whole(root):
    """Assert that every folder with the name of a checkpoint is valid."""
    for path in checkpoint.list_checkpoints(root):
        _assert_whole(path)


@pytest.mark.promise
def test_a_kill_at_any_write_point_leaves_whole_checkpoints(pristine, saver):
    root = pristine.with_name("root")
    assert saver(shutil.copytree(pristine, root), "one_round", 10**9) == 0
    num_points = int(root.with_name("root.count").read_text())
    shutil.rmtree(root)
    assert num_points > 30
    newest = []
    for point in range(1, num_points + 1):
        shutil.copytree(pristine, root)
        assert saver(root, "one_round", point) == -signal.SIGKILL
        found, skipped = checkpoint.find_latest(root)
        assert found is not None and skipped == [], f"point {point}"
        _assert_all_whole(root)
        newest.append(checkpoint.iteration_of(found.name))
        assert (root / "iter_0000001").is_dir() or newest[-1] == 2, f"point {point}"
        # the next process saves as usual, and a run removes the leftovers of the dead process
        assert saver(root, "one_save", 3) == 0
        assert checkpoint.find_latest(root)[0] == root / "iter_0000003"
        checkpoint.remove_leftovers(root)
        assert not [path.name for path in root.iterdir() if path.name.startswith(".")], (
            f"point {point}"
        )
        shutil.rmtree(root)
    assert newest == sorted(newest) and set(newest) == {
        1,
        2,
    }  # control: kills before and after the first rename


def test_control_a_save_without_rename_would_be_caught(pristine, saver):
    assert saver(pristine, "naive_save", 5) == -signal.SIGKILL
    found, skipped = checkpoint.find_latest(pristine)
    assert found == pristine / "iter_0000001" and [path.name for path, _ in skipped] == [
        "iter_0000002"
    ]
