"""One job per folder: a lock that the kernel drops when its process ends, however it ends.

`flock` on `run.lock`, which holds the process id and host of the holder for the message of the one that is refused.
Not here: what a job does with its folder (libai/engine/run/run_folder.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any

from libai.utils.atomic import read_json
from libai.utils.errors import UserError

LOCK_FILE = "run.lock"
#: a look at the lock (`find_holder`) holds it for a moment, which must not refuse anybody
_TRIES, _TRY_SECONDS = 4, 0.05
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderInUseError(UserError):
    """Another job writes into the folder."""


class FolderLock:
    """Holds `folder` for this process from construction to `release`; raises `FolderInUseError` when another does.

    Processes that are forked from this one do not hold it. Where the file system knows no locks, nothing is held.
    """

    def __init__(self, folder: Path):
        self._path = folder / LOCK_FILE
        self._descriptor: int | None = None
        for attempt in range(_TRIES):
            self._descriptor = _open_locked(self._path)
            if self._descriptor is not None:
                break
            time.sleep(_TRY_SECONDS if attempt < _TRIES - 1 else 0.0)
        else:
            raise FolderInUseError(describe_holder(folder, read_json(folder / LOCK_FILE)))
        _held.add(self)
        if self._descriptor >= 0:
            text = json.dumps({"pid": os.getpid(), "host": os.uname().nodename})
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Let others have the folder. May be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or descriptor < 0:
            return
        if _is_file_at(descriptor, self._path):
            self._path.unlink(missing_ok=True)
        os.close(descriptor)

    def _forget(self) -> None:
        """Close this (forked) process's copy; the lock stays the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)


def find_holder(folder: Path) -> dict[str, Any] | None:
    """`{"pid": …, "host": …}` of the process that holds `folder`, as far as it is known; None when nobody does.

    Changes nothing.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return read_json(folder / LOCK_FILE)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def describe_holder(folder: Path, holder: dict[str, Any]) -> str:
    """The one line for a job that is refused."""
    who = f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "another process"
    return (
        f"train.output_dir={folder} is in use: {who} trains there now, and two jobs in one folder would mix their "
        "checkpoints and metrics. Set train.output_dir to another folder, or wait for (or stop) that job."
    )


def _open_locked(path: Path) -> int | None:
    """A descriptor that holds the lock, None when another process has it, -1 where there are no locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # such as some network file systems
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return -1
        if _is_file_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its holder has released and removed it in between


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_forget_all)
