"""The cache folder for prepared data. One process prepares the data while all others wait."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from libai.checkpoint.durable import new_folder
from libai.data.errors import DataError

_logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return the absolute path of `$LIBAI_DATA_DIR`, or of `~/.cache/libai` if the variable is
    unset.

    Raises `DataError` without a home folder, where `~` would be a folder in the working directory.
    """
    chosen = os.environ.get("LIBAI_DATA_DIR")
    folder = Path(os.path.expanduser(chosen or "~/.cache/libai"))
    if folder.parts[0].startswith("~"):
        raise DataError(
            f"{folder} has no home folder to start from: HOME is unset and this user id has no "
            "entry in the user database. Set LIBAI_DATA_DIR to the absolute path of a folder."
        )
    return folder.absolute()


def prepare_once(
    folder: Path, is_complete: Callable[[Path], bool], write: Callable[[Path], None]
) -> Path:
    """Fill `folder` by calling `write`, unless it is already complete, and return it.

    Any number of processes may call this at once, whether or not they are ranks of one job. One
    process writes and the others wait for it. `write` gets an empty temporary folder, which is
    renamed in one step at the end, so `folder` never contains partial data. An existing folder that
    is incomplete (damaged) is replaced. Raises `DataError` if the location cannot be written.
    """
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not is_complete(folder):
                if folder.exists():
                    _logger.warning(
                        "the prepared data in %s is damaged or incomplete: preparing it again",
                        folder,
                    )
                with new_folder(folder) as work:
                    write(work)
    except OSError as error:
        raise DataError(
            f"preparing data in {folder} failed ({error}): check space and permissions, or choose "
            "another folder with cache_dir=... or the environment variable LIBAI_DATA_DIR."
        ) from error
    return folder
