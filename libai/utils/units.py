"""Sizes as people write them: `40GiB`, `1.5 TB`, `25GB/s`."""

from __future__ import annotations

import re

from libai.utils.errors import UserError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
_BY_NAME = {name.lower(): factor for name, factor in _UNITS.items()}


def parse_bytes(text: str | int, what: str = "the size") -> int:
    """Bytes of `40GiB` (1024-based), `40GB` (1000-based) or a plain number; `what` names it in the error.

    Raises `UserError` for anything else, and for a size that is not above 0.

    >>> parse_bytes("1.5KiB")
    1536
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", str(text))
    factor = _BY_NAME.get(match[2].lower()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if size <= 0:
        raise UserError(
            f"{what}={text!r} is no size in bytes. Write a number above 0 with a unit: 40GiB, 512MiB, 24GB."
        )
    return size


def format_bytes(size: float) -> str:
    """`size` in the largest binary unit of which there is at least one.

    >>> format_bytes(1536), format_bytes(12)
    ('1.5 KiB', '12 B')
    """
    for factor, unit in ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"
