"""Allow one job per folder, by a lock that the kernel releases when its process ends for any
reason.

`run.lock` stores the process id and host of the holder, for the message to a job that is refused.
libai/engine/run/run_folder.py handles the contents of the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from libai.utils.atomic import naming, read_json
from libai.utils.errors import UserError

LOCK_FILE = "run.lock"
#: `find_holder` holds the lock for a moment, which must not make another job fail
_PATIENCE_SECONDS = 0.2


class FolderInUseError(UserError):
    """Raised if another job writes into the folder."""


class FolderLock:
    """A lock on `folder`, which this process holds from construction to `release`.

    Raises `FolderInUseError` if another process holds the folder. Forked processes do not hold the
    lock. If the file system does not support locks, nothing is locked.
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
        with naming(self._path):
            self._path.write_text(json.dumps(self._holder), encoding="utf-8")

    def release(self) -> None:
        """Release the folder. May be called several times."""
        if not self._lock.is_locked:  # also in a forked process, because the parent keeps the lock
            return
        if read_json(self._path) == self._holder:  # otherwise another job has recreated the folder
            with contextlib.suppress(PermissionError):  # the folder may have become read-only
                self._path.unlink(
                    missing_ok=True
                )  # before the release, so that a waiting process sees that it is gone
        self._lock.release()


def find_holder(folder: Path) -> dict[str, Any] | None:
    """Return `{"pid": …, "host": …}` of the process that holds `folder`, or None if it is free.

    The dict is empty if the holder is unknown. The result is also None if the file system does not
    support locks.
    """
    path = folder / LOCK_FILE
    if not path.exists():  # acquiring the lock would create the file
        return None
    try:
        with _lock_at(path).acquire(timeout=0):
            return None
    except Timeout:
        return read_json(path)
    except OSError:
        return None


def describe_holder(folder: Path, holder: dict[str, Any]) -> str:
    """Return the message for a job that is refused."""
    who = (
        f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "another process"
    )
    return (
        f"train.output_dir={folder} is in use: {who} is training there, and two jobs in one "
        "folder would mix their checkpoints and metrics. Set train.output_dir to another folder, "
        "or wait for (or stop) that job."
    )


def _lock_at(path: Path) -> FileLock:
    """Return a lock that belongs to the process, not a thread.

    The file of a dead process does not keep it locked.
    """
    return FileLock(path, thread_local=False, fallback_to_soft=False)
