"""Directories that appear whole; leftovers of the dead are cleared, the work of the living is not."""

import errno
import os

import pytest

from libai.checkpoint import durable
from libai.checkpoint.durable import WorkDirectory, remove_leftovers, write_file


def _names(root):
    return sorted(path.name for path in root.iterdir())


def _publish(root, name, content):
    with WorkDirectory(root, name) as work:
        write_file(work.path / "x", content)
        return work.publish()


def test_nothing_is_visible_before_publish(tmp_path):
    with WorkDirectory(tmp_path, "iter_0000001") as work:
        write_file(work.path / "x", b"1")
        assert all(name.startswith(".saving-") for name in _names(tmp_path))
        work.publish()
        assert _names(tmp_path) == ["iter_0000001"]


@pytest.mark.parametrize("has_exchange", [True, False])
def test_publishing_replaces_what_was_there(tmp_path, monkeypatch, has_exchange):
    def refuse(a, b):
        raise OSError(errno.EINVAL, "no exchange here")

    if not has_exchange:
        monkeypatch.setattr(durable, "_exchange", refuse)
    _publish(tmp_path, "iter_0000001", b"old")
    final = _publish(tmp_path, "iter_0000001", b"new")
    assert (final / "x").read_bytes() == b"new"
    assert _names(tmp_path) == ["iter_0000001"]


def test_the_work_of_a_living_process_is_left_alone(tmp_path):
    with WorkDirectory(tmp_path, "iter_0000001") as work:
        assert remove_leftovers(tmp_path) == []
        assert work.path.is_dir()


def test_the_work_of_a_dead_process_is_cleared(tmp_path):
    (tmp_path / "keep").mkdir()
    child = os.fork()
    if child == 0:  # leaves without any clean-up, as after kill -9
        WorkDirectory(tmp_path, "iter_0000001")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(_names(tmp_path)) == 2
    assert len(remove_leftovers(tmp_path)) == 1
    assert _names(tmp_path) == ["keep"]


def test_a_checkpoint_moved_aside_by_a_dead_process_is_put_back(tmp_path):
    aside = tmp_path / ".replaced-iter_0000001-abcdef"
    aside.mkdir()
    (aside / "x").write_bytes(b"old")
    remove_leftovers(tmp_path)
    assert (tmp_path / "iter_0000001" / "x").read_bytes() == b"old"
