"""The folder of prepared data; one of many processes prepares it while the others wait."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from libai.data.errors import DataError

_logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """`$LIBAI_DATA_DIR`, or `~/.cache/libai` when it is unset."""
    return Path(os.environ.get("LIBAI_DATA_DIR") or Path.home() / ".cache" / "libai")


def prepare_once(folder: Path, is_complete: Callable[[Path], bool], write: Callable[[Path], None]) -> Path:
    """Return `folder` filled by `write`, doing the work only if it is not complete yet.

    Any number of processes may call at once, ranks or not: one writes, the others wait for it. `write` gets an empty
    temporary folder, which is renamed in one step when it is done, so `folder` never holds half of the data. A folder
    that is there but not complete (damaged) is replaced. Raises `DataError` when the place cannot be written.
    """
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not is_complete(folder):
                if folder.exists():
                    _logger.warning("the prepared data in %s is damaged or not complete: making it again", folder)
                _write_and_rename(folder, write)
    except OSError as error:
        raise DataError(
            f"preparing data in {folder} failed ({error}): check space and permissions, or name another folder with "
            "cache_dir=... or the environment variable LIBAI_DATA_DIR."
        ) from error
    return folder


def _write_and_rename(folder: Path, write: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}.tmp-"
    for left_behind in folder.parent.glob(f"{prefix}*"):  # by a killed process: the lock is ours, so nobody uses it
        shutil.rmtree(left_behind, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it private; prepared data may be shared like any other file
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
