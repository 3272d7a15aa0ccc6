import os
import stat
import threading

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

    data: object = b"new"
    if broken == "write":
        data = "text where bytes belong"
    else:
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises((OSError, TypeError)):
        atomic_write_bytes(path, data)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "no temporary file may stay behind"


def test_a_plain_write_does_lose_the_old_file(tmp_path):
    """Negative control: what the atomic write protects from."""
    path = tmp_path / "state.json"
    path.write_text("old")
    with pytest.raises(TypeError), open(path, "wb") as file:
        file.write("text where bytes belong")
    assert path.read_text() == ""


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "state"
    versions = [bytes([i]) * 200_000 for i in range(2)]
    atomic_write_bytes(path, versions[0])
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(path.read_bytes() in versions)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(30):
        atomic_write_bytes(path, versions[i % 2])
    stop.set()
    reader.join()
    assert seen == {True}


def test_the_file_has_the_usual_permissions(tmp_path):
    path = tmp_path / "shared"
    before = os.umask(0o022)
    try:
        atomic_write_text(path, "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        atomic_write_text(tmp_path / "nowhere" / "x", "x")
