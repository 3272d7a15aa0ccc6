"""The errors of the data package: one for the user's mistakes, one for a dataset that fails while it is read."""

from __future__ import annotations

import math
import numbers
from pathlib import Path
from typing import Any

from libai.utils.errors import UserError

_MAX_NAMES = 8


class DataError(UserError):
    """A file, folder, dataset or loader argument that cannot be used; the text says what to change."""


class SampleError(RuntimeError):
    """A dataset raised while a sample was read; the text names the sample, the cause is chained with its traceback."""


def checked_count(name: str, value: Any, most: int, zero: str) -> int:
    """`value` itself; raises `DataError` unless it is a whole number from 0, whose meaning is `zero`, to `most`."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_whole and 0 <= value <= most:
        return value
    nearest = ""
    if isinstance(value, numbers.Real) and math.isfinite(value):
        nearest = f" Nearest: {min(max(round(float(value)), 0), most)}."
    raise DataError(f"{name}={value!r}: expected a whole number from 0 ({zero}) to {most}.{nearest}")


def describe_folder(folder: Path) -> str:
    """Describe what is there instead, for an error text: `does not exist`, `is empty` or `holds [names]`."""
    if not folder.is_dir():
        return "does not exist"
    names = sorted(path.name for path in folder.iterdir())
    more = " and more" if len(names) > _MAX_NAMES else ""
    return f"holds {names[:_MAX_NAMES]}{more}" if names else "is empty"
