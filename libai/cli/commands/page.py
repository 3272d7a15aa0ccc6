"""One HTML page with tables and curves for `libai compare`: no scripts, and nothing that has to be fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

#: tag -> iterations and values
Curves = dict[str, tuple[list[int], list[float]]]

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td{padding:.15em 1.5em .15em 0;border-bottom:1px solid #ddd}
td{overflow-wrap:anywhere}tr:first-child td,svg .title{font-weight:bold}
svg text{font:11px system-ui,sans-serif;fill:#222}"""
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf")
#: a dashed curve over a solid one leaves both visible if they are equal
_DASHES = ("none", "7 5", "2 4")
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 466, 26, 242
#: points of a curve: more than there are pixels would only make the page large
_MAX_POINTS = 1000


def page_of(tables: Sequence[Sequence[Sequence[str]]], runs: Mapping[str, Curves]) -> str:
    """Return the page as HTML: tables, each with its header first, then a plot for each metric."""
    parts = [_table(rows) for rows in tables]
    for number, name in enumerate(runs):
        sample = f'<svg width="40" height="10"><path d="M0 5H40" {_stroke(number)}/></svg>'
        parts.append(f"<div>{sample} {escape(name)}</div>")
    tags = list(dict.fromkeys(tag for curves in runs.values() for tag in curves))
    parts += [_plot(tag, [curves.get(tag, ([], [])) for curves in runs.values()]) for tag in tags]
    if not tags:
        parts.append("<p>No run has metrics yet.</p>")
    title = escape(" and ".join(runs))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _stroke(number: int) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    dashes = _DASHES[number % len(_DASHES)]
    return f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linecap="round" stroke-dasharray="{dashes}"'


def _plot(title: str, curves: Sequence[tuple[Sequence[int], Sequence[float]]]) -> str:
    """An `<svg>` element with a line for each of `curves`, iterations and values; those that are not finite are left
    out."""
    finite = [[(x, y) for x, y in zip(*curve) if math.isfinite(y)] for curve in curves]
    x_low, x_high = _limits([x for points in finite for x, _ in points])
    y_low, y_high = _limits([y for points in finite for _, y in points])

    def across(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (_RIGHT - _LEFT)

    def down(y: float) -> float:
        return _BOTTOM - (y - y_low) / (y_high - y_low) * (_BOTTOM - _TOP)

    parts = [f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>']
    parts.append(f'<text x="{_RIGHT}" y="{_BOTTOM + 32}" text-anchor="end">iteration</text>')
    for value in _ticks(y_low, y_high):
        parts.append(f'<path d="M{_LEFT} {down(value):.1f}H{_RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for value in _ticks(x_low, x_high):
        parts.append(f'<text x="{across(value):.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{value:.6g}</text>')
    for number, points in enumerate(finite):
        step = len(points) // _MAX_POINTS + 1
        places = [f"{across(x):.1f} {down(y):.1f}" for x, y in points[::step]]
        if places:  # `h0` makes a dot of a point that is alone
            parts.append(f'<path d="M{"L".join(places)}h0" {_stroke(number)}/>')
    return '<svg width="480" height="280" role="img">\n' + "\n".join(parts) + "\n</svg>"


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest value; a range around one value alone."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if low < high:
        return low, high
    around = abs(low) / 10 or 1.0
    return low - around, high + around


def _ticks(low: float, high: float) -> list[float]:
    """Return two to six round values between the limits.

    >>> _ticks(0.3, 2.2)
    [0.5, 1.0, 1.5, 2.0]
    """
    step = 10.0 ** math.ceil(math.log10((high - low) / 2))
    while (high - low) / step < 2.5:
        step /= 2
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
