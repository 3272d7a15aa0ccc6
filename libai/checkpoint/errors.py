"""The errors of everything that reads or writes checkpoints, and the phrase their texts share."""

from __future__ import annotations

from libai.utils.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read or trusted; the text names the file and what to do."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that could not be written: space, a failing disk, memory, permission. No mistake in the config, and
    it may work the next time: the process ends with 1, so that `--max-restarts` applies."""

    exit_code = 1


def os_reason(error: OSError) -> str:
    """What the operating system said, without the errno and the path repeated."""
    return error.strerror or str(error) or type(error).__name__
