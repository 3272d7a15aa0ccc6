import os

import pytest

from libai.utils.atomic import atomic_write_bytes, atomic_write_text


def test_a_file_is_created_and_replaced(tmp_path):
    path = tmp_path / "state.json"
    atomic_write_text(path, "old é")
    assert path.read_text(encoding="utf-8") == "old é"
    atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_the_old_file_survives_a_failure_at_any_point(tmp_path, monkeypatch, broken):
    path = tmp_path / "state.json"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    data = b"new"
    if broken == "write":
        data = "text where bytes belong"
    else:
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises((OSError, TypeError)):
        atomic_write_bytes(path, data)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "no temporary file may stay behind"
