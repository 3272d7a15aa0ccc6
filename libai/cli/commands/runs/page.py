"""One HTML page with tables and curves: no scripts, and nothing that has to be fetched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from libai.cli.commands.runs.records import Curves

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em;color:#222;background:#fff}
table{border-collapse:collapse}td,th{text-align:left;padding:.15em 1.5em .15em 0;border-bottom:1px solid #ddd}
td,th{overflow-wrap:anywhere}svg text{font:11px system-ui,sans-serif;fill:#222}svg .title{font-weight:bold}"""
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf")
#: a dashed curve over a solid one leaves both visible where they are equal
_DASHES = ("none", "7 5", "2 4")
_WIDTH, _HEIGHT = 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 466, 26, 242
#: points of a curve: more than there are pixels would only make the page large
_MAX_POINTS = 1000


def page_of(tables: Mapping[str, Sequence[Sequence[str]]], runs: Mapping[str, Curves]) -> str:
    """The page as HTML: tables by title, each with its header first, then a plot for each metric."""
    parts = [_table(title, rows) for title, rows in tables.items()]
    tags = list(dict.fromkeys(tag for curves in runs.values() for tag in curves))
    parts += ["<h2>Curves</h2>", _legend(list(runs)) if tags else "<p>No run has metrics yet.</p>"]
    parts += [plot(tag, [curves.get(tag, ([], [])) for curves in runs.values()]) for tag in tags]
    title = escape(" and ".join(runs))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return f"<h2>{escape(title)}</h2><table>\n" + "\n".join(lines) + "\n</table>"


def _legend(names: Sequence[str]) -> str:
    lines = []
    for number, name in enumerate(names):
        sample = f'<svg width="40" height="10"><path d="M0 5H40" {_stroke(number)}/></svg>'
        lines.append(f"<div>{sample} {escape(name)}</div>")
    return "\n".join(lines)


def _stroke(number: int) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    return f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'


def plot(title: str, curves: Sequence[tuple[Sequence[int], Sequence[float]]]) -> str:
    """An `<svg>` element with a line for each of `curves`, iterations and values; what is not finite leaves a gap."""
    finite = [(x, y) for xs, ys in curves for x, y in zip(xs, ys) if math.isfinite(y)]
    x_low, x_high = _limits([x for x, _ in finite])
    y_low, y_high = _limits([y for _, y in finite])

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_RIGHT - _LEFT)
        down = _BOTTOM - (y - y_low) / (y_high - y_low) * (_BOTTOM - _TOP)
        return across, down

    parts = [f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>']
    parts.append(f'<text x="{_RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">iteration</text>')
    for value in _ticks(y_low, y_high):
        _, down = place(x_low, value)
        parts.append(f'<path d="M{_LEFT} {down:.1f}H{_RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for value in _ticks(x_low, x_high):
        across, _ = place(value, y_low)
        parts.append(f'<text x="{across:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{value:.6g}</text>')
    for number, (xs, ys) in enumerate(curves):
        points = [place(x, y) if math.isfinite(y) else None for x, y in _thinned(xs, ys)]
        parts.append(f'<path d="{_path(points)}" stroke-linecap="round" {_stroke(number)}/>')
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">\n' + "\n".join(parts) + "\n</svg>"


def _thinned(xs: Sequence[int], ys: Sequence[float]) -> list[tuple[int, float]]:
    """All points, or every n-th and the last."""
    points = list(zip(xs, ys))
    step = math.ceil(len(points) / _MAX_POINTS) or 1
    return [point for number, point in enumerate(points) if number % step == 0 or number == len(points) - 1]


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    words = []
    command = "M"
    for point in points:
        if point is None:
            command = "M"
            continue
        # a line of no length is drawn as a dot, for a point without neighbours
        words.append(f"{command}{point[0]:.1f} {point[1]:.1f}" + ("h0" if command == "M" else ""))
        command = "L"
    return "".join(words)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The least and the largest value; a range around one value alone."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if low < high:
        return low, high
    around = abs(low) / 10 or 1.0
    return low - around, high + around


def _ticks(low: float, high: float) -> Iterator[float]:
    """Three to seven round values between the limits.

    >>> list(_ticks(0.3, 2.2))
    [0.5, 1.0, 1.5, 2.0]
    """
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough or factor == 10)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step
