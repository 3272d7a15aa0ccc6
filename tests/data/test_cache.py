"""Data is prepared once, by the first process, atomically, and again if it is damaged."""

import os
import threading
import time
from pathlib import Path

import pytest

from libai.data import DataError
from libai.data.cache import default_cache_dir, prepare_once


def is_complete(folder):
    return (folder / "done").is_file()


def write_done(folder):
    (folder / "done").write_text("x")


def test_damaged_data_and_leftovers_of_a_killed_process_are_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "half").write_text("x")
    (tmp_path / ".saving-data").mkdir()
    prepare_once(tmp_path / "data", is_complete, write_done)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["done"]
    assert not (tmp_path / ".saving-data").exists()


def test_others_wait_and_never_see_half_of_it(tmp_path):
    folder, calls, seen = tmp_path / "data", [], []

    def slow_write(temporary):
        calls.append(1)
        (temporary / "first").write_text("x")
        time.sleep(0.2)
        write_done(temporary)

    def prepare():
        seen.append(
            sorted(path.name for path in prepare_once(folder, is_complete, slow_write).iterdir())
        )

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not folder.exists() or is_complete(folder)
        time.sleep(0.005)
    assert len(calls) == 1 and seen == [["done", "first"]] * 4


def test_a_place_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="LIBAI_DATA_DIR"):
        prepare_once(tmp_path / "file" / "data", is_complete, write_done)


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002], ids=oct)
def test_the_umask_decides_who_may_read_prepared_data(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = prepare_once(tmp_path / "data", is_complete, write_done)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (folder / "done").stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_default_folder_is_absolute(workdir, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LIBAI_DATA_DIR", "~/data")
    assert default_cache_dir() == Path("/home/ada/data")
    monkeypatch.setenv("LIBAI_DATA_DIR", "data")
    assert default_cache_dir() == workdir / "data"
    monkeypatch.delenv("LIBAI_DATA_DIR")
    assert default_cache_dir() == Path("/home/ada/.cache/libai")
    # a user id without a home folder, as in a container with a random one
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(DataError, match="no home folder .*Set LIBAI_DATA_DIR"):
        default_cache_dir()
