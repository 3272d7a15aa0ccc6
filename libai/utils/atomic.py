"""Files that are either the old or the new whole, whatever happens in between."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from libai.utils.disk import naming


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace (or create) `path` with `data`, on disk when this returns.

    Written beside `path`, fsynced, renamed: a reader sees the old file or the new one, also after a crash. The parent
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
