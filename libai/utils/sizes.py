"""Check the sizes of models and layers before OneFlow uses them, format sizes in bytes, and split
lists into buckets.

OneFlow 0.9.0 ends the process (SIGABRT) if a layer is initialized with a negative size.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from libai.utils.errors import UserError

T = TypeVar("T")
_ORDERS = {"<": operator.lt, "<=": operator.le}


def is_size(value: Any) -> bool:
    """Return True for an integer of at least 1. Booleans do not count.

    >>> is_size(3), is_size(0), is_size(True), is_size(3.0)
    (True, False, False, False)
    """
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_sizes(error: type[UserError] = UserError, /, **sizes: Any) -> None:
    """Raise `error` for the first invalid size. Each size is a number or a list of numbers."""
    for name, value in sizes.items():
        is_list = isinstance(value, (list, tuple))
        if not all(map(is_size, value)) if is_list else not is_size(value):
            wanted = (
                "each must be a whole number >= 1"
                if is_list
                else "a size must be a whole number >= 1"
            )
            raise error(f"{name}={list(value) if is_list else value!r}: {wanted}.")


def check_range(allowed: str, error: type[UserError] = UserError, /, **values: Any) -> None:
    """Raise `error` for the first value that is not a number in the range `allowed`.

    >>> check_range("0 <= x < 1", decay=0.9)
    >>> check_range("0 <= x < 1", decay=1.5)
    Traceback (most recent call last):
        ...
    libai.utils.errors.UserError: decay=1.5: it must be a number with 0 <= decay < 1.
    """
    low, above, _, below, high = allowed.split()
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if is_number and _ORDERS[above](float(low), value) and _ORDERS[below](value, float(high)):
            continue
        raise error(f"{name}={value!r}: it must be a number with {allowed.replace('x', name)}.")


def check_known(
    name: str, value: Any, known: Iterable[Any], error: type[UserError] = UserError
) -> None:
    """Raise `error` if `value` is not one of the `known` values of the argument `name`."""
    if value not in known:
        raise error(f"{name}={value!r} is unknown. Use {' or '.join(map(repr, known))}.")


def available_bytes() -> int | None:
    """Return the memory available for new allocations on this machine in bytes, or None if it is
    unknown.
    """
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None


def format_bytes(size: float) -> str:
    """Format `size` in bytes with the largest binary unit that gives a value of at least 1.

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
    """Split `items` into buckets, in order.

    The items of a bucket have the same kind and a total size up to `max_size`.

    A larger item gets its own bucket.
    """
    buckets = []
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
