"""Write files atomically, read the small files of a run, and explain errors of full disks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from libai.utils.errors import UserError
from libai.utils.sizes import format_bytes

#: error of an exhausted limit -> what to do
_RAISE = {
    errno.EFBIG: "Raise the limit of `ulimit -f`",
    errno.EMFILE: "Raise the limit of `ulimit -n`",
    errno.EAGAIN: "Raise the limit of `ulimit -u`",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

AnyPath: TypeAlias = "str | os.PathLike[str]"


def atomic_write_bytes(path: AnyPath, data: bytes) -> None:
    """Replace or create `path` with `data`. The data is on disk when this returns.

    The data is written to a temporary file in the same folder, fsynced and renamed. A reader sees
    either the old or the new file, even after a crash. The parent folder must exist. On failure,
    the old file stays and the temporary file is removed.
    """
    with replacing(Path(path)) as temporary, naming(path), open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(Path(path).parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which replaces `path` at the end of
    the block.

    After an exception the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: AnyPath, text: str) -> None:
    """Write `text` in UTF-8 by `atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode())


def config_of_run(folder: Path) -> Path:
    """Return the config file in the output folder of a run. Raises `UserError` if there is none."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(
            f"{folder} does not contain a run: it has no config.yaml. Give the output folder of a "
            "run."
        )
    return file


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or `{}` if it cannot be read or is not an object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def point_link(link: Path, target: Path) -> None:
    """Atomically make `link` a relative symbolic link to `target`.

    An existing file that is not a link is kept.
    """
    if link.exists() and not link.is_symlink():
        return
    with replacing(link) as temporary:
        temporary.symlink_to(os.path.relpath(target, link.parent))


def fsync_path(path: AnyPath) -> None:
    """Flush a file to disk, or the names in a folder, so that a rename or a new file in it survives
    a power cut.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Add `path` to an `OSError` raised in the block without a file name, as by a failed write."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if the error or its cause means that a disk is full or a limit on files is
    reached.
    """
    causes = (error, getattr(error, "__cause__", None))
    return any(getattr(cause, "errno", None) in (*FULL, errno.EMFILE) for cause in causes)


def explain_os_error(error: OSError, is_of_user: bool) -> str | None:
    """Return a message about a full disk, an exhausted limit or an inaccessible file.

    Returns None for other errors.

    If the error comes from the user's code (`is_of_user`), only a full disk is explained, because
    the traceback helps more with other errors.
    """
    path = error.filename2 or error.filename
    remedy = _RAISE.get(error.errno or 0)
    if path and error.errno in FULL:
        path = os.fsdecode(path)
        space = free_space(path) if remedy is None else ""
        remedy = remedy or "Free space there, or set train.output_dir to a folder on another disk"
        return (
            f"{path} cannot be written: {error.strerror}{space}. {remedy}. Checkpoints that were "
            "saved before are untouched."
        )
    if "temporary directory" in str(error):
        remedy = (
            "Free space in one of them, raise the limit of `ulimit -f`, or set TMPDIR to a "
            "writable folder"
        )
    elif path:
        remedy = remedy or "Choose a file or folder that you can access (umask, owner, mode)"
    if is_of_user or remedy is None:
        return None
    place = f"{path}: " if path else ""
    return f"{place}{error.strerror}. {remedy}."


def free_space(path: AnyPath) -> str:
    """Return text such as `, 12 KiB are free there` for the disk of `path`, or "" if the free space
    is unknown.
    """
    folder = Path(path)
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        return f", {format_bytes(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        return ""
