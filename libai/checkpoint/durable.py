"""Files that are either wholly there after a crash or not there at all.

A directory is filled under a temporary name beside its final one, every file is fsynced, one rename makes it visible
and the parent is fsynced. The process that fills it holds a lock on it (`flock`), which the kernel drops when the
process dies, however it dies: so leftovers of the dead can be told from the work of the living, across containers too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from libai.utils.atomic import fsync_dir

_FILLING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_CHUNK_BYTES = 8 * 1024 * 1024
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100

# The seam of the fault tests: die by SIGKILL at the n-th point (1 = the first) that this process passes.
_kill_at_point = int(os.environ.get("LIBAI_TEST_KILL_AT_FAULT_POINT", "0"))
_points_passed: list[str] = []


def fault_point(name: str) -> None:
    """Mark a moment at which a crash must do no harm. Does nothing, except in the tests that crash there."""
    if _kill_at_point:
        _points_passed.append(name)
        if len(_points_passed) == _kill_at_point:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class FileRecord:
    """What is known of a finished file: its size and SHA-256."""

    num_bytes: int
    sha256: str


class DurableFile:
    """A new file whose size and digest are known when it is finished. Refuses to touch an existing one."""

    def __init__(self, path: Path):
        self._name = path.name
        self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by finish or __exit__)
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append `data` (a view of bytes), in pieces that keep kernel and digest busy without a copy."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            self._digest.update(piece)
            self._num_bytes += len(piece)
            while len(piece):  # an unbuffered write may be short
                piece = piece[self._file.write(piece) :]
            fault_point(f"write {self._name}")

    def finish(self) -> FileRecord:
        """Force the file to disk and close it."""
        os.fsync(self._file.fileno())
        self._file.close()
        fault_point(f"fsync {self._name}")
        return FileRecord(self._num_bytes, self._digest.hexdigest())


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a new file and force it to disk."""
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def make_directory(path: Path) -> None:
    """Make `path` and its missing parents, durably."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)


class WorkDirectory:
    """A locked directory beside `root/name` that becomes `root/name` when it is published.

    Leaving the `with` block without `publish` removes it.
    """

    def __init__(self, root: Path, name: str):
        self._root, self._name = root, name
        while True:
            self.path = root / f"{_FILLING}{name}-{secrets.token_hex(6)}"
            self.path.mkdir()
            try:
                descriptor = _lock(self.path)
            except OSError:  # no locks on this file system: leftovers stay then, see remove_leftovers
                descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            if descriptor is not None:
                break  # else a cleaner came between mkdir and lock and took it for a leftover: make another
        self._descriptor = descriptor
        fault_point("make directory")

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        # After publish this path is free, or holds the checkpoint that was replaced: in both cases remove it.
        _remove_tree(self.path)
        os.close(self._descriptor)

    def publish(self) -> Path:
        """Make the directory visible under its final name, replacing what has that name, and return its path."""
        final = self._root / self._name
        os.fsync(self._descriptor)
        fault_point("fsync directory")
        has_moved_aside = False
        while True:
            try:
                os.rename(self.path, final)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # the last: a link has the name
                    raise
            try:
                _exchange(self.path, final)
                break
            except FileNotFoundError:
                continue  # it was pruned in between, so the plain rename can work now
            except OSError:  # a file system without RENAME_EXCHANGE: free the name, then try again
                _move_aside(final, self._root)
                has_moved_aside = True
        fault_point("rename directory")
        fsync_dir(self._root)
        fault_point("fsync root")
        if has_moved_aside:
            remove_leftovers(self._root)
        return final


def _remove_tree(path: Path) -> None:
    """Delete a directory, or a link to one but not what it leads to."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Delete a directory so that a crash in the middle never leaves half of it under its name."""
    doomed = path.with_name(f"{_DELETING}{path.name}-{secrets.token_hex(6)}")
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return  # another process deleted it first
    fault_point("rename for deletion")
    _remove_tree(doomed)


def remove_leftovers(root: Path) -> list[str]:
    """Clear what dead processes left in `root`; returns the names. Never touches the work of a living process.

    A checkpoint that was moved aside by a process that then died is put back. What cannot be removed (a read-only
    file system, one without locks) is left alone.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(root.iterdir()):
            if path.name.startswith((_FILLING, _REPLACED, _DELETING)) and _remove_if_dead(path, root):
                removed.append(path.name)
    return removed


def _remove_if_dead(path: Path, root: Path) -> bool:
    try:
        descriptor = _lock(path)
    except OSError:
        return False
    if descriptor is None:
        return False
    try:
        if path.name.startswith(_REPLACED):
            original = root / path.name[len(_REPLACED) :].rpartition("-")[0]
            with contextlib.suppress(OSError):
                os.rename(path, original)  # fails when the replacement is in place: then this one is superseded
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """A locked descriptor of a directory, None when another process has it. `OSError` where locks do not work (NFS)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):  # not renamed or removed before the lock
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _exchange(a: Path, b: Path) -> None:
    """Swap two directories in one step, so that at no moment either name is missing (Linux 3.15)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "no renameat2")
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(b))


def _move_aside(final: Path, root: Path) -> None:
    """Rename `final` so that its name is free; `remove_leftovers` puts it back if this process dies before the end."""
    with contextlib.suppress(FileNotFoundError):  # pruned in between
        os.rename(final, root / f"{_REPLACED}{final.name}-{secrets.token_hex(6)}")
    fault_point("move aside")
