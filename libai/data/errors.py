"""The errors of the data package: one for user mistakes, and one for datasets that fail while they
are read.
"""

from __future__ import annotations

import numbers
from pathlib import Path
from typing import Any

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


def checked_count(name: str, value: Any, most: int, zero: str) -> int:
    """Return `value` if it is an integer from 0 to `most`, else raise `DataError`.

    `zero` explains the meaning of 0.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_whole and 0 <= value <= most:
        return value
    raise DataError(f"{name}={value!r}: expected a whole number from 0 ({zero}) to {most}.")


def describe_folder(folder: Path) -> str:
    """Describe what a folder contains instead, for an error text: `does not exist`, `is empty` or
    `holds [names]`.
    """
    if not folder.is_dir():
        return "does not exist"
    names = sorted(path.name for path in folder.iterdir())
    more = " and more" if len(names) > _MAX_NAMES else ""
    return f"holds {names[:_MAX_NAMES]}{more}" if names else "is empty"
