"""The errors of everything that reads or writes checkpoints, and the two phrases their texts share."""

from __future__ import annotations

from libai.utils.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read or trusted; the text names the file and what to do."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that could not be written: space, a failing disk, memory, permission. No mistake in the config, and
    it may work the next time: the process ends with 1, so that `--max-restarts` applies."""

    exit_code = 1


def format_bytes(num_bytes: float) -> str:
    """`1.5 GB`, `20.0 MB`, `12 B`: decimal units, as disks are sold.

    >>> format_bytes(1_500_000_000), format_bytes(12)
    ('1.5 GB', '12 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{int(num_bytes)} B"


def os_reason(error: OSError) -> str:
    """What the operating system said, without the errno and the path repeated."""
    return error.strerror or str(error) or type(error).__name__
