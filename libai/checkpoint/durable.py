"""Folders that are either wholly there after a crash or not there at all.

A folder is filled under a temporary name next to its final one, every file is forced to disk, and one rename makes it
visible. No lock is needed: temporary names are unique, and only `remove_leftovers`, which a run calls while it holds
its output folder, deletes what another process may have made.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from libai.utils.atomic import fsync_dir

_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_NAME_IS_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # the last: a link or a file has the name
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
    work = _temporary(_SAVING, final)
    work.mkdir()
    try:
        yield work
        _publish(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, final: Path) -> None:
    fsync_dir(work)
    while True:
        try:
            os.rename(work, final)
            break
        except OSError as error:
            if error.errno not in _NAME_IS_TAKEN:
                restore_replaced(final.parent)
                raise
        # A kill after this rename and before the next turn's leaves no `final`: `restore_replaced` puts it back.
        _rename_aside(_REPLACED, final)
    fsync_dir(final.parent)
    token = "?" * 12  # not `*`: a checkpoint called model is not to delete model-best
    for replaced in final.parent.glob(f"{_REPLACED}{final.name}-{token}"):
        _remove_tree(replaced)


def remove_directory(path: Path) -> None:
    """Delete a directory so that a crash in the middle never leaves half of it under its name."""
    _remove_tree(_rename_aside(_DELETING, path))


def restore_replaced(root: Path) -> None:
    """Give a checkpoint its name back whose replacement never came, since the process that saved it has died.

    Does no harm to a living process, which moves it aside again.
    """
    for path in sorted(root.glob(f"{_REPLACED}*")):
        original = root / path.name.removeprefix(_REPLACED).rpartition("-")[0]
        with suppress(OSError):
            if not os.path.lexists(original):
                os.rename(path, original)


def remove_leftovers(root: Path) -> None:
    """Clear what dead processes have left in `root`. No living process may save there: hold the run's folder."""
    restore_replaced(root)
    for pattern in (f"{_SAVING}*", f"{_REPLACED}*", f"{_DELETING}*", ".*.tmp"):  # the last: of `libai.utils.atomic`
        for path in list(root.glob(pattern)):
            _remove_tree(path)


def _temporary(prefix: str, path: Path) -> Path:
    return path.with_name(f"{prefix}{path.name}-{secrets.token_hex(6)}")


def _rename_aside(prefix: str, path: Path) -> Path:
    aside = _temporary(prefix, path)
    with suppress(FileNotFoundError):  # another process was faster
        os.rename(path, aside)
    return aside


def _remove_tree(path: Path) -> None:
    """Delete a directory or a file, or a link but not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
