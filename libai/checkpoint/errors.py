"""Errors for reading and writing checkpoints, and helpers to build their messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libai.utils.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or trusted.

    The message names the file and the remedy.
    """


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written because of disk space, a disk failure, memory or
    permissions.

    The config is not at fault and a retry may succeed, so the process exits with code 1 and
    `--max-restarts` applies.
    """

    exit_code = 1


def os_reason(error: OSError) -> str:
    """Return the operating system's reason, without the errno and the path."""
    return error.strerror or str(error) or type(error).__name__


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Convert an `OSError` raised while the block reads `path` into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {os_reason(error)}.") from None
