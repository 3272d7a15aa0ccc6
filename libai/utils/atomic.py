"""Files that are either the old or the new whole, whatever happens in between; and disks that are full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libai.utils.sizes import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace (or create) `path` with `data`, on disk when this returns.

    Written next to `path`, fsynced, renamed: a reader sees the old file or the new one, also after a crash. The parent
    folder must exist. On failure the old file stays and nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path), open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """`atomic_write_bytes` of `text` in UTF-8."""
    atomic_write_bytes(path, text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, `{}` when there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def point_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, in one step. What is there and is no link stays."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}.{secrets.token_hex(4)}.tmp")
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make the names in folder `path` (a rename, a new file) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
