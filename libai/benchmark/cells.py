"""Figures as the text of a table's cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_AVAILABLE = "n/a"


def format_spread(estimate: Mapping[str, Any] | None, scale: float = 1.0, unit: str = "") -> str:
    """`12.3 ±4%`: a median and how far it may be off, half of its 95 % interval relative to it."""
    if not estimate:
        return NOT_AVAILABLE
    median = estimate["median"]
    off = (estimate["high"] - estimate["low"]) / 2 / median if median else 0.0
    shown = f"{short(median * scale)}{unit}"
    return f"{shown} ±{off:.0%}" if off >= 0.095 else f"{shown} ±{off:.1%}"


def short(value: float) -> str:
    """Three digits, or whole thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
