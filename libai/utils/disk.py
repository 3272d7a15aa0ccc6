"""Disks that are full: which file could not be written, and how much space is left there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from libai.utils.sizes import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put `path` into an `OSError` of the block that names no file: a failed write does not know its file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_full_disk(error: BaseException | None) -> bool:
    """True for an error that says that a disk, a quota or the limit of `ulimit -f` is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def explain_full_disk(error: BaseException) -> str | None:
    """The sentence for the user about an error of `is_full_disk`, with the file and the space that is left; else None.

    None as well when the error names no file.
    """
    if not isinstance(error, OSError) or not is_full_disk(error) or error.filename is None:
        return None
    path = os.fsdecode(error.filename)
    remedy = "Free space there, or set train.output_dir to a folder on another disk"
    if error.errno == errno.EFBIG:
        remedy = "Raise the limit of `ulimit -f`"
    space = free_space(path) if error.errno != errno.EFBIG else ""
    reason = f"{path} cannot be written: {error.strerror}{space}"
    return f"{reason}. {remedy}. Checkpoints that were saved before are untouched."


def free_space(path: str | os.PathLike[str]) -> str:
    """`, 12 KiB are free there` for the disk of `path`, the empty string when it cannot be asked."""
    folder = Path(path)
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        return f", {format_bytes(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        return ""
