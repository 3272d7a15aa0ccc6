"""The errors of the data package: one for user mistakes, and one for datasets that fail while they
are read.
"""

from __future__ import annotations

from pathlib import Path

from libai.utils.errors import UserError

_MAX_NAMES = 8


class DataError(UserError):
    """A file, folder, dataset or loader argument cannot be used.

    The text explains what to change.
    """


class SampleError(RuntimeError):
    """A dataset raised an error while a sample was read.

    The text names the sample; the original error is chained.
    """


def describe_folder(folder: Path) -> str:
    """Describe what a folder contains instead, for an error text: `does not exist`, `is empty` or
    `holds [names]`.
    """
    if not folder.is_dir():
        return "does not exist"
    names = sorted(path.name for path in folder.iterdir())
    more = " and more" if len(names) > _MAX_NAMES else ""
    return f"holds {names[:_MAX_NAMES]}{more}" if names else "is empty"
