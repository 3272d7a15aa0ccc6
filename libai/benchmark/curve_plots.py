"""The plot of a curve: time per iteration and throughput over what was swept, one line per contender."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from libai.benchmark.curves import Curve
from libai.benchmark.plot_style import COLOURS, LINES, OTHER_COLOUR, OTHER_LINE

#: a range of times wider than this is drawn on a logarithmic axis, where the swept values are
_WIDE = 4.0


def paint_curve(figure: Any, curve: Curve) -> None:
    """Draw both panels into an empty figure."""
    times, rates = figure.subplots(1, 2)
    places, is_log = _places(curve.values)
    field, unit = curve.rate
    for axes, name, scale in ((times, "step_seconds", 1e3), (rates, field, 1.0)):
        for contender, line in curve.lines.items():
            _paint_line(axes, contender, [(x, c[name]) for x, c in zip(places, line) if c and name in c], line, scale)
        if is_log:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, curve.values)
        axes.minorticks_off()
        axes.margins(x=0.06)
        axes.set_xlabel(curve.label)
        axes.set_ylim(bottom=0)
    times.set_ylabel("ms per iteration", labelpad=6)
    rates.set_ylabel(unit, labelpad=6)
    rates.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if is_log and not curve.kind:
        _make_wide_axis_logarithmic(times, curve)
    if curve.kind:
        _paint_linear(rates, places, curve, field)
    handles, labels = rates.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), 6)), frameon=False)
    title = textwrap.fill(curve.title, 96, break_long_words=False, break_on_hyphens=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _paint_line(
    axes: Any,
    name: str,
    points: Sequence[tuple[float, Mapping[str, float]]],
    line: Sequence[Mapping[str, Any] | None],
    scale: float,
) -> None:
    mode = next(c["mode"] for c in line if c is not None)
    marker, style = LINES.get(mode, OTHER_LINE)
    middle = [y["median"] * scale for _, y in points]
    below = [(y["median"] - y["low"]) * scale for _, y in points]
    above = [(y["high"] - y["median"]) * scale for _, y in points]
    axes.errorbar(
        [x for x, _ in points],
        middle,
        [below, above],
        color=COLOURS.get(mode, OTHER_COLOUR),
        marker=marker,
        markersize=5,
        linestyle=style,
        linewidth=1.6,
        elinewidth=1.0,
        capsize=3,
        label=name,
    )


def _places(values: Sequence[str]) -> tuple[list[float], bool]:
    """Where values stand on the axis, and whether it is logarithmic: where they are geometric."""
    try:
        places = [float(value) for value in values]
    except ValueError:  # names, not numbers: evenly spaced
        return [float(number) for number in range(len(values))], False
    ratios = [b / a for a, b in zip(places, places[1:]) if a > 0]
    is_geometric = len(ratios) == len(places) - 1 and len(ratios) > 1 and min(ratios) > 1.2
    return places, is_geometric and max(ratios) <= 1.25 * min(ratios)


def _make_wide_axis_logarithmic(axes: Any, curve: Curve) -> None:
    shown = [c["step_seconds"] for line in curve.lines.values() for c in line if c]
    low, high = (pick(c[end] for c in shown) * 1e3 for pick, end in ((min, "low"), (max, "high")))
    if high / low < _WIDE:
        return
    axes.set_yscale("log")
    axes.set_ylim(low / 1.25, high * 1.25)
    steps = (1, 2, 5) if high / low < 200 else (1,)
    decades = range(math.floor(math.log10(low / 1.25)), math.ceil(math.log10(high * 1.25)) + 1)
    ticks = [step * 10.0**power for power in decades for step in steps]
    inside = [tick for tick in ticks if low / 1.25 <= tick <= high * 1.25]
    axes.set_yticks(inside, [f"{tick:,.6g}" for tick in inside])
    axes.minorticks_off()


def _paint_linear(axes: Any, places: Sequence[float], curve: Curve, field: str) -> None:
    """What the first contender would reach if every process added as much as the first does."""
    first = next(iter(curve.lines.values()))[0]
    if first is not None and field in first:
        each = first[field]["median"] / places[0]
        top = axes.get_ylim()[1]
        axes.plot(places, [each * place for place in places], color="#aaaaaa", linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            "linear",
            (places[-1], each * places[-1]),
            (-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="#777777",
        )
        axes.set_ylim(0, max(top, each * places[-1] * 1.1))
