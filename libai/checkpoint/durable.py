"""Folders that are either wholly there after a crash or not there at all.

A folder is filled under a temporary name next to its final one, every file is forced to disk, and one rename makes it
visible. One process at a time may write: a run holds the lock of its output folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from libai.utils.atomic import fsync_dir

_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_CHUNK_BYTES = 1024 * 1024


class FileRecord(NamedTuple):
    """Size and SHA-256 of a finished file."""

    bytes: int
    sha256: str


def digest(file: BinaryIO) -> str:
    """Return the SHA-256 of what is left to read of an open file."""
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        sha256.update(buffer[:count])
    return sha256.hexdigest()


def finish_file(path: Path) -> FileRecord:
    """Force a written file to disk and return its record."""
    with open(path, "rb") as file:
        record = FileRecord(os.fstat(file.fileno()).st_size, digest(file))
        os.fsync(file.fileno())
    return record


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a file, force it to disk and return its record."""
    path.write_bytes(data)
    return finish_file(path)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `final` at the end of the `with` block, in place of what has that name.

    After an exception nothing of it is left.
    """
    work = final.with_name(_SAVING + final.name)
    _remove_tree(work)
    work.mkdir()
    try:
        yield work
        fsync_dir(work)
        restore_replaced(final.parent)
        replaced = final.with_name(_REPLACED + final.name)
        if os.path.lexists(final):
            _remove_tree(replaced)
            os.rename(final, replaced)
        os.rename(work, final)  # a kill before this leaves no `final`: `restore_replaced` puts it back
        fsync_dir(final.parent)
        _remove_tree(replaced)
    finally:
        restore_replaced(final.parent)
        _remove_tree(work)


def remove_directory(path: Path) -> None:
    """Delete a directory so that a crash in the middle never leaves half of it under its name."""
    aside = path.with_name(_DELETING + path.name)
    _remove_tree(aside)
    os.rename(path, aside)
    _remove_tree(aside)


def restore_replaced(root: Path) -> None:
    """Give a checkpoint its name back whose replacement never came, since the process that saved it has died."""
    for path in root.glob(f"{_REPLACED}*"):
        original = path.with_name(path.name.removeprefix(_REPLACED))
        if not os.path.lexists(original):
            os.rename(path, original)


def remove_leftovers(root: Path) -> None:
    """Clear what dead processes have left in `root`. No living process may save there: hold the run's folder."""
    restore_replaced(root)
    for pattern in (f"{_SAVING}*", f"{_REPLACED}*", f"{_DELETING}*", ".*.tmp"):  # the last: of `libai.utils.atomic`
        for path in list(root.glob(pattern)):
            _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """Delete a directory or a file, or a link but not what it leads to, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
