"""The errors of everything that reads or writes checkpoints, and the phrase their texts share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libai.utils.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read or trusted; the text names the file and what to do."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that could not be written: space, a failing disk, memory, permission. No mistake in the config, and
    it may work the next time: the process ends with 1, so that `--max-restarts` applies."""

    exit_code = 1


def os_reason(error: OSError) -> str:
    """Return the reason that the operating system gave, without the errno and the path repeated."""
    return error.strerror or str(error) or type(error).__name__


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn an `OSError` of the block, which reads `path`, into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {os_reason(error)}.") from None
