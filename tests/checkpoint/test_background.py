"""Background saves: the snapshot is taken during the call, saves do not overlap, and errors are
raised by the next call.
"""

import threading

import numpy as np
import pytest

from libai import checkpoint
from libai.checkpoint import AsyncCheckpointer, CheckpointError, background


@pytest.fixture
def gate(monkeypatch):
    """Writes wait until the event is set."""
    event = threading.Event()
    write = background.write_checkpoint

    def wait_then_write(*arguments):
        assert event.wait(20)
        return write(*arguments)

    monkeypatch.setattr(background, "write_checkpoint", wait_then_write)
    yield event
    event.set()


def test_what_is_written_is_the_moment_of_the_call(tmp_path, gate):
    array, state = np.zeros(1000), {"iter": [1]}
    checkpointer = AsyncCheckpointer(tmp_path)
    path = checkpointer.save(1, {"model": {"a": array}}, state)
    array += 1
    state["iter"].append(2)
    assert not path.exists()  # still in the background
    gate.set()
    checkpointer.close()
    loaded = checkpoint.load(path)
    assert loaded.tensors["model"]["a"].sum() == 0
    assert loaded.state == {"iter": [1]}


def test_at_most_one_write_is_in_flight(tmp_path, gate):
    checkpointer = AsyncCheckpointer(tmp_path)
    checkpointer.save(1, {"model": {"a": np.ones(1)}}, {})
    threading.Timer(0.2, gate.set).start()
    second = checkpointer.save(2, {"model": {"a": np.ones(1)}}, {})
    assert (tmp_path / "iter_0000001").exists()  # the first one was waited for
    checkpointer.close()
    assert second.exists()


@pytest.mark.parametrize("where", ["check", "save", "close"])
def test_a_failure_in_the_background_is_raised_once_at_the_next_call(tmp_path, monkeypatch, where):
    def fail(*arguments):
        raise CheckpointError("checkpoint iter_0000001 could not be written: disk on fire")

    checkpointer = AsyncCheckpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(background, "write_checkpoint", fail)
        checkpointer.save(1, {"model": {}}, {})
        checkpointer._pending.exception()  # wait for it
    with pytest.raises(CheckpointError, match="disk on fire"):
        {
            "check": checkpointer.check,
            "close": checkpointer.close,
            "save": lambda: checkpointer.save(2, {}, {}),
        }[where]()
    checkpointer.check()
    checkpointer.save(3, {"model": {"a": np.ones(1)}}, {})
    checkpointer.close()
    assert checkpoint.verify(tmp_path / "iter_0000003") == []
