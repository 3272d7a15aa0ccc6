"""Build the HTML page of tables and curves for `libai compare`.

It has no scripts and loads nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

#: iterations (or learning rates) and values
Curve = tuple[list[int] | list[float], list[float]]
#: tag -> curve
Curves = dict[str, tuple[list[int], list[float]]]

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td{padding:.15em 1.5em .15em 0;border-bottom:1px solid #ddd}
td{overflow-wrap:anywhere}tr:first-child td{font-weight:bold}figure{display:inline-block;margin:1em 2em 1em 0}
path{fill:none;stroke-width:1.8;stroke-linecap:round;vector-effect:non-scaling-stroke}
figure{max-width:100%}figure svg{display:block;border:1px solid #ddd;overflow:visible}
svg{box-sizing:border-box;max-width:100%}text{font-size:12px;fill:#555}
path.grid{stroke:#ddd;stroke-width:1}"""  # noqa: E501
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf")
#: a dashed curve over a solid one leaves both visible if they are equal
_DASHES = ("none", "7 5", "2 4")
#: size of a plot and its margins, in pixels
_WIDTH, _HEIGHT = 520, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 8, 24
#: maximum number of points per curve; more points than pixels would only make the page larger
_MAX_POINTS = 1000


def page_of(
    tables: Sequence[Sequence[Sequence[str]]],
    runs: Mapping[str, Curves],
    finders: Mapping[str, Curve] | None = None,
) -> str:
    """Return the page as HTML: first the tables, whose first rows are headers, then one plot per
    metric, with evaluations first and speed last.

    `runs`: name in the legend → curves. `finders`: name → curve of the learning-rate finder.
    """
    title = escape(" and ".join(runs))
    parts = [f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>']
    parts.append(f"<style>{_STYLE}</style></head><body><h1>{title}</h1>")
    parts += map(_table, tables)
    for number, name in enumerate(runs):
        sample = f'<svg width="40" height="10"><path d="M0 5H40" {_stroke(number)}/></svg>'
        parts.append(f"<div>{sample} {escape(name)}</div>")
    tags = _tags_to_plot(list(runs.values()))
    parts += [_plot(tag, [curves.get(tag, ([], [])) for curves in runs.values()]) for tag in tags]
    if finders:
        # sorted like the legend, so a run keeps its colour
        found = [finders.get(name, ([], [])) for name in runs]
        parts.append(_plot("learning-rate finder: loss by learning rate", found, log_x=True))
    parts.append("</body></html>\n" if tags else "<p>No run has metrics yet.</p></body></html>\n")
    return "\n".join(parts)


def _tags_to_plot(runs: Sequence[Curves]) -> list[str]:
    """Return the tags in the order of the page, without a loss that repeats another's curves and
    without epochs, which are a straight line.
    """
    tags = dict.fromkeys(tag for curves in runs for tag in curves if tag != "train/epoch")
    chosen: list[str] = []
    for tag in sorted(tags, key=lambda tag: (tag.startswith("perf/"), not tag.startswith("eval/"))):
        is_repeated = tag.startswith("train/") and any(
            all(curves.get(tag) == curves.get(other) for curves in runs) for other in chosen
        )
        if not is_repeated:
            chosen.append(tag)
    return chosen


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _stroke(number: int) -> str:
    return (
        f'stroke="{_COLOURS[number % len(_COLOURS)]}" '
        f'stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
    )


def _plot(title: str, curves: Sequence[Curve], *, log_x: bool = False) -> str:
    """Return a figure with one line per curve, and an empty string if no value is finite.

    `curves`: x values and y values of each run. `log_x`: a logarithmic x axis, for learning rates.
    """
    finite = [[(x, y) for x, y in zip(*curve) if math.isfinite(y)] for curve in curves]
    everything = [point for points in finite for point in points]
    if not everything:
        return ""
    scale_x = math.log10 if log_x else float
    # ticks of a logarithmic axis are powers of ten
    least_step = 1.0 if log_x else 0.0
    across = _Axis([scale_x(x) for x, _ in everything], _LEFT, _WIDTH - _RIGHT, least_step)
    up = _Axis([y for _, y in everything], _HEIGHT - _BOTTOM, _TOP)
    parts = [f"<figure><figcaption><b>{escape(title)}</b></figcaption>"]
    parts.append(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">'
    )
    for value in across.ticks:
        x = across.place(value)
        label = f"1e{value:g}" if log_x else f"{value:g}"
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{label}</text>')
    for value in up.ticks:
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for number, points in enumerate(finite):
        places = [
            f"{across.place(scale_x(x)):.1f} {up.place(y):.1f}"
            for x, y in points[:: len(points) // _MAX_POINTS + 1]
        ]
        if places:  # `h0` makes a dot of a single point
            parts.append(f'<path d="M{"L".join(places)}h0" {_stroke(number)}/>')
    return "\n".join([*parts, "</svg></figure>"])


class _Axis:
    """Maps values to pixels from `start` to `end`, with ticks at round numbers."""

    def __init__(self, values: Sequence[float], start: float, end: float, least_step: float = 0.0):
        self._low = min(values)
        self._span = max(values) - self._low or 1.0
        self._start = start
        self._end = end
        # the step is 1, 2 or 5 times a power of ten, for four to nine ticks
        power = 10.0 ** math.floor(math.log10(self._span / 4))
        step = power * max(factor for factor in (1, 2, 5) if factor * power <= self._span / 4)
        step = max(step, least_step)
        first = math.ceil(self._low / step)
        last = math.floor((self._low + self._span) / step)
        self.ticks = [number * step for number in range(first, last + 1)]

    def place(self, value: float) -> float:
        """Return the pixel of `value`."""
        return self._start + (value - self._low) / self._span * (self._end - self._start)
