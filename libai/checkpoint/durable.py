"""Write folders atomically: after a crash, a folder is either complete or absent.

A folder is filled under a temporary name next to its final path. Every file is flushed to disk,
once, and a single rename makes the folder visible. Only one process may write at a time; a run
holds the lock of its output folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from libai.checkpoint.errors import CheckpointWriteError
from libai.utils.atomic import fsync_path

_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_CHUNK_BYTES = 1024 * 1024


class FileRecord(NamedTuple):
    """Size and SHA-256 of a finished file."""

    bytes: int
    sha256: str


def digest(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file, from its current position to the end."""
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        sha256.update(buffer[:count])
    return sha256.hexdigest()


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> FileRecord:
    """Write `parts` into a file, read it back, and return its record.

    Raises `CheckpointWriteError` if the file has other bytes than the memory.
    """
    with open(path, "wb") as file:
        file.writelines(parts)
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        for part in parts:
            for start in range(0, len(part), _CHUNK_BYTES):
                chunk = bytes(part[start : start + _CHUNK_BYTES])
                if file.read(len(chunk)) != chunk:
                    raise CheckpointWriteError(
                        f"{path.name} has other bytes than the memory from which it was written, "
                        f"so it is not kept. Files that existed in {path.parents[1]} are "
                        "untouched. The memory, the processor or the disk is faulty: test them, "
                        "and continue on another machine (--resume)."
                    )
                sha256.update(chunk)
        return FileRecord(file.tell(), sha256.hexdigest())


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to fill with files.

    At the end of the `with` block it becomes `final` and replaces whatever was there.

    After an exception the new folder is removed.
    """
    work = final.with_name(_SAVING + final.name)
    _remove_tree(work)
    work.mkdir()
    try:
        yield work
        for path in sorted(work.iterdir()):
            fsync_path(path)
        fsync_path(work)
        restore_replaced(final.parent)
        replaced = final.with_name(_REPLACED + final.name)
        if os.path.lexists(final):
            _remove_tree(replaced)
            os.rename(final, replaced)
        # if the process is killed before this, `restore_replaced` restores the old `final`
        os.rename(work, final)
        fsync_path(final.parent)
        _remove_tree(replaced)
    finally:
        restore_replaced(final.parent)
        _remove_tree(work)


def remove_directory(path: Path) -> None:
    """Delete a directory atomically: rename it first, so a crash cannot leave a partial directory
    at `path`.
    """
    aside = path.with_name(_DELETING + path.name)
    _remove_tree(aside)
    os.rename(path, aside)
    _remove_tree(aside)


def restore_replaced(root: Path) -> None:
    """Restore checkpoints that were moved aside by a process that died before it put the
    replacement in place.
    """
    for path in root.glob(f"{_REPLACED}*"):
        original = path.with_name(path.name.removeprefix(_REPLACED))
        if not os.path.lexists(original):
            os.rename(path, original)


def remove_leftovers(root: Path) -> None:
    """Restore replaced checkpoints in `root` and delete leftovers of dead processes.

    No other process may be saving there: hold the lock of the run's folder.
    """
    restore_replaced(root)
    # .tmp is from `libai.utils.atomic`
    for pattern in (f"{_SAVING}*", f"{_REPLACED}*", f"{_DELETING}*", ".*.tmp"):
        for path in list(root.glob(pattern)):
            _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """Delete a directory, file or symbolic link if it exists. The target of a link is kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
