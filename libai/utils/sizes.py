"""Sizes that models and layers are built with: whole numbers of at least 1, checked before OneFlow sees them.

OneFlow 0.9.0 ends the process (SIGABRT) when a layer is initialised with a negative size.
"""

from __future__ import annotations

import numbers
from typing import Any

from libai.utils.errors import UserError


def is_size(value: Any) -> bool:
    """True for a whole number of at least 1; truth values are none.

    >>> is_size(3), is_size(0), is_size(True), is_size(3.0)
    (True, False, False, False)
    """
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_sizes(**sizes: Any) -> None:
    """Raise `UserError` for the first of `sizes`, each a number or a list of numbers, that is none."""
    for name, value in sizes.items():
        is_list = isinstance(value, (list, tuple))
        if not all(map(is_size, value)) if is_list else not is_size(value):
            wanted = "each must be a whole number >= 1" if is_list else "a size must be a whole number >= 1"
            raise UserError(f"{name}={list(value) if is_list else value!r}: {wanted}.")


def check_rate(**rates: Any) -> None:
    """Raise `UserError` for the first of `rates` that is no number above 0."""
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise UserError(f"{name}={value!r}: it must be a number > 0.")


def available_bytes() -> int | None:
    """Memory that new allocations can have on this machine, in bytes; None where the kernel does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
