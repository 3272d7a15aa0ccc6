"""Build the HTML page of tables and curves for `libai compare`.

It has no scripts and loads nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

#: tag -> iterations and values
Curves = dict[str, tuple[list[int], list[float]]]

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td{padding:.15em 1.5em .15em 0;border-bottom:1px solid #ddd}
td{overflow-wrap:anywhere}tr:first-child td{font-weight:bold}figure{display:inline-block;margin:1em 2em 1em 0}
path{fill:none;stroke-width:1.8;stroke-linecap:round;vector-effect:non-scaling-stroke}
figure{max-width:100%}figure svg{display:block;border:1px solid #ddd;overflow:visible}
svg{box-sizing:border-box;max-width:100%}"""  # noqa: E501
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf")
#: a dashed curve over a solid one leaves both visible if they are equal
_DASHES = ("none", "7 5", "2 4")
#: maximum number of points per curve; more points than pixels would only make the page larger
_MAX_POINTS = 1000


def page_of(tables: Sequence[Sequence[Sequence[str]]], runs: Mapping[str, Curves]) -> str:
    """Return the page as HTML: first the tables, whose first rows are headers, then one plot per
    metric.
    """
    title = escape(" and ".join(runs))
    parts = [f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>']
    parts.append(f"<style>{_STYLE}</style></head><body><h1>{title}</h1>")
    parts += map(_table, tables)
    for number, name in enumerate(runs):
        sample = f'<svg width="40" height="10"><path d="M0 5H40" {_stroke(number)}/></svg>'
        parts.append(f"<div>{sample} {escape(name)}</div>")
    tags = list(dict.fromkeys(tag for curves in runs.values() for tag in curves))
    parts += [_plot(tag, [curves.get(tag, ([], [])) for curves in runs.values()]) for tag in tags]
    parts.append("</body></html>\n" if tags else "<p>No run has metrics yet.</p></body></html>\n")
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _stroke(number: int) -> str:
    return (
        f'stroke="{_COLOURS[number % len(_COLOURS)]}" '
        f'stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
    )


def _plot(tag: str, curves: Sequence[tuple[Sequence[int], Sequence[float]]]) -> str:
    """Return a figure with one line per curve, given as iterations and values.

    Non-finite values are skipped.
    """
    finite = [[(x, y) for x, y in zip(*curve) if math.isfinite(y)] for curve in curves]
    everything = [point for points in finite for point in points] or [(0, 0.0)]
    xs, ys = zip(*everything)
    width = max(xs) - min(xs) or 1
    height = max(ys) - min(ys) or 1.0
    parts = [f"<figure><figcaption><b>{escape(tag)}</b> from {min(ys):.6g} to {max(ys):.6g},"]
    parts.append(f"iteration {min(xs)} to {max(xs)}</figcaption>")
    parts.append(
        '<svg width="480" height="240" viewBox="0 0 1 1" preserveAspectRatio="none" role="img">'
    )
    for number, points in enumerate(finite):
        places = [
            f"{(x - min(xs)) / width:.4f} {(max(ys) - y) / height:.4f}"
            for x, y in points[:: len(points) // _MAX_POINTS + 1]
        ]
        if places:  # `h0` makes a dot of a single point
            parts.append(f'<path d="M{"L".join(places)}h0" {_stroke(number)}/>')
    return "\n".join([*parts, "</svg></figure>"])
