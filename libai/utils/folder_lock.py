"""One job per folder: a lock that the kernel drops when its process ends, however it ends.

`run.lock` holds the process id and host of the holder, for the message to the job that is refused. Not here: what a job
does with its folder (libai/engine/run/run_folder.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from libai.utils.atomic import read_json
from libai.utils.errors import UserError

LOCK_FILE = "run.lock"
#: a look at the lock (`find_holder`) holds it for a moment, which must not refuse anybody
_PATIENCE_SECONDS = 0.2


class FolderInUseError(UserError):
    """Another job writes into the folder."""


class FolderLock:
    """Holds `folder` for this process from construction to `release`; raises `FolderInUseError` when another does.

    Processes that are forked from this one do not hold it. Where the file system has no locks, nothing is held.
    """

    def __init__(self, folder: Path):
        self._path = folder / LOCK_FILE
        self._holder = {"pid": os.getpid(), "host": os.uname().nodename}
        self._lock = _lock_at(self._path)
        try:
            self._lock.acquire(timeout=_PATIENCE_SECONDS)
        except Timeout:
            raise FolderInUseError(describe_holder(folder, read_json(self._path))) from None
        except (PermissionError, NotADirectoryError):
            raise
        except OSError:  # such as some network file systems
            self._path.unlink(missing_ok=True)
            return
        self._path.write_text(json.dumps(self._holder), encoding="utf-8")

    def release(self) -> None:
        """Release the folder for others. May be called again."""
        if not self._lock.is_locked:  # also in a forked process, where the lock stays the parent's
            return
        if read_json(self._path) == self._holder:  # else the folder was removed and another job made it again
            self._path.unlink(missing_ok=True)  # before the release: who waits for this file sees that it is gone
        self._lock.release()


def find_holder(folder: Path) -> dict[str, Any] | None:
    """Return `{"pid": …, "host": …}` of the process that holds `folder`, as far as it is known; None if nobody does."""
    path = folder / LOCK_FILE
    if not path.exists():  # else looking would make it
        return None
    lock = _lock_at(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return read_json(path)
    except OSError:
        return None
    lock.release()
    return None


def describe_holder(folder: Path, holder: dict[str, Any]) -> str:
    """Return the one line for a job that is refused."""
    who = f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "another process"
    return (
        f"train.output_dir={folder} is in use: {who} trains there now, and two jobs in one folder would mix their "
        "checkpoints and metrics. Set train.output_dir to another folder, or wait for (or stop) that job."
    )


def _lock_at(path: Path) -> FileLock:
    """Return a lock of the process, not of a thread, that a file left behind by a dead one cannot hold."""
    return FileLock(path, thread_local=False, fallback_to_soft=False)
