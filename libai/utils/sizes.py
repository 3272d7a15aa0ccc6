"""Sizes that models and layers are built with, checked before OneFlow sees them; sizes in bytes for readers;
and lists cut into parts by the sizes of their items.

OneFlow 0.9.0 ends the process (SIGABRT) when a layer is initialised with a negative size.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from libai.utils.errors import UserError

T = TypeVar("T")


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


def format_bytes(size: float) -> str:
    """`size` in the largest binary unit of which there is at least one.

    >>> format_bytes(1536), format_bytes(12)
    ('1.5 KiB', '12 B')
    """
    for factor, unit in ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"


def cut_into_buckets(
    items: Iterable[T], kind_of: Callable[[T], Any], size_of: Callable[[T], int], max_size: int
) -> list[list[T]]:
    """`items` in order, cut into lists of one kind and at most `max_size` together; a larger one is alone."""
    buckets: list[list[T]] = []
    newest: dict[Any, tuple[list[T], int]] = {}
    for item in items:
        kind, size = kind_of(item), size_of(item)
        bucket, filled = newest.get(kind, ([], 0))
        if not bucket or filled + size > max_size:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(item)
        newest[kind] = bucket, filled + size
    return buckets
