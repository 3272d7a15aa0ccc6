"""Plots of a report as SVG: bars with error bars, the break-even chart, and curves over what was swept.

Light, on white paper also in dark mode, and told apart without colour too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from libai.benchmark.report import Curve, cases_of_their_own, find_curves
from libai.utils.errors import UserError

#: mode → colour, marker, line: one hue per family, the compiled member of which is the darker and has square markers;
#: our trainers solid, hand-written loops dashed, stock ones dotted
_LOOKS = {
    "eager": ("#5b8fd0", "o", "-"),
    "graph": ("#163f78", "s", "-"),
    "raw-eager": ("#7dbb7d", "o", "--"),
    "raw-eager-sync": ("#b5d9b0", "v", "--"),
    "raw-graph": ("#2f7d4f", "s", "--"),
    "raw-graph-sync": ("#5fa777", "^", "--"),
    "eager-stock": ("#dda568", "o", ":"),
    "graph-stock": ("#a8651f", "s", ":"),
    "command": ("#9873b8", "D", "-."),
}
_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "axes.edgecolor": "#888888",
    "svg.fonttype": "none",
    "svg.hashsalt": "libai",
}
#: a range of times wider than this is drawn on a logarithmic axis
_WIDE = 4.0


def require_matplotlib() -> None:
    """Raise `UserError` when plots cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "plots need matplotlib, which is not installed: pip install matplotlib, or --no-plots."
        ) from None


def draw(report: Mapping[str, Any], folder: Path, prefix: str = "") -> dict[str, list[Path]]:
    """Draw all that a report gives into `folder`, which is made; returns title → the files about it.

    A case on several numbers of processes has its curve, and a case of a sweep is part of one. The same report gives
    the same bytes.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[Path]] = {}
    with pyplot.rc_context(_STYLE):
        for name, title, size, paint in _plots(report):
            figure = pyplot.figure(figsize=size, layout="constrained")
            paint(figure)
            file = folder / f"{prefix}{name}.svg"
            figure.savefig(file, metadata={"Date": None})
            pyplot.close(figure)
            files.setdefault(title, []).append(file)
    return files


def _plots(report: Mapping[str, Any]) -> list[tuple[str, str, tuple[float, float], Callable[[Any], None]]]:
    """`(name, title, size in inches, what fills a figure)` of each plot."""
    found: list[tuple[str, str, tuple[float, float], Callable[[Any], None]]] = []
    curves = find_curves(report)
    drawn = [case["title"] for curve in curves for case in curve.cases]
    cases = [case for case in cases_of_their_own(report, curves) if case["title"] not in drawn]
    for number, case in enumerate(cases, start=1):
        suffix, title = "" if len(cases) == 1 else f"_{number}", case["title"]
        height = 1.4 + 0.42 * len(_shown(case))
        found.append((f"times{suffix}", title, (8.0, height), partial(_paint_bars, case=case)))
        if case["break_even"]:
            paint = partial(_paint_break_even, case=case, point=case["break_even"][0])
            found.append((f"break_even{suffix}", title, (7.0, 4.2), paint))
    for curve in curves:
        found.append((f"curve_{curve.name}", curve.title, (9.0, 4.2), partial(_paint_curve, curve=curve)))
    return found


def _shown(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [c for c in case["variants"] if not c["unavailable"] and not c["is_peak"]]


def _look(mode: str) -> tuple[str, str, str]:
    return _LOOKS.get(mode, ("#999999", "o", "-"))


def _paint_bars(figure: Any, case: Mapping[str, Any]) -> None:
    """Milliseconds per iteration; the whiskers are the 10th and 90th percentile of the blocks."""
    axes, variants = figure.subplots(), _shown(case)[::-1]
    steps = [{name: value * 1e3 for name, value in c["step_seconds"].items()} for c in variants]
    medians = [step["median"] for step in steps]
    above = [step["p90"] - step["median"] for step in steps]
    bars = axes.barh(
        [c["name"] for c in variants],
        medians,
        xerr=[[step["median"] - step["p10"] for step in steps], above],
        color=[_look(c["mode"])[0] for c in variants],
        error_kw={"ecolor": "#8c8c8c", "elinewidth": 1.2, "capsize": 3},  # seen on dark bars and on paper
        height=0.66,
    )
    for bar, variant in zip(bars, variants):
        if variant["twin_of"]:
            bar.set(hatch="///", edgecolor="white")
    for row, (median, high) in enumerate(zip(medians, above)):
        text, place = f"{median:,.0f}" if median >= 1000 else f"{median:.3g}", (median + high, row)
        axes.annotate(text, place, xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms per iteration (median; whiskers: 10th to 90th percentile of the blocks)")
    axes.set_title(case["title"], loc="left", fontsize=10)


def _paint_break_even(figure: Any, case: Mapping[str, Any], point: Mapping[str, Any]) -> None:
    """Seconds until an iteration is done, compilation included, for a compiled variant and its eager one."""
    axes, by_name = figure.subplots(), {c["name"]: c for c in case["variants"]}
    pays = point["iterations"]
    end = max(20.0, 2.5 * pays) if pays else 200.0
    for name in (point["baseline"], point["variant"]):
        variant = by_name[name]
        step, first, colour = variant["step_seconds"], variant["first_seconds"], _look(variant["mode"])[0]
        low, middle, high = ([first, first + (end - 1) * step[key]] for key in ("low", "median", "high"))
        axes.fill_between([1.0, end], low, high, color=colour, alpha=0.25, linewidth=0)
        axes.plot([1.0, end], middle, color=colour, linewidth=2, label=name)
    if pays:
        axes.axvline(pays, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(f"after {pays}", (pays, axes.get_ylim()[1]), (5, -12), textcoords="offset points", fontsize=9)
    axes.set(xlabel="iterations", ylabel="seconds, compilation included")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    axes.set_title(f"{case['title']}\n{point['reason']}", loc="left", fontsize=10)


def _paint_curve(figure: Any, curve: Curve) -> None:
    """Time per iteration and throughput over what was swept, one line per variant."""
    times, rates = figure.subplots(1, 2)
    places = range(len(curve.values))  # evenly spaced, which is what doubled values are on a logarithmic axis
    field, unit = curve.rate
    for axes, name, scale in ((times, "step_seconds", 1e3), (rates, field, 1.0)):
        for variant, line in curve.lines.items():
            _paint_line(axes, variant, [(x, c, c[name]) for x, c in zip(places, line) if c and name in c], scale)
        axes.set_xticks(places, curve.values)
        axes.margins(x=0.06)
        axes.set_xlabel(curve.label)
        axes.set_ylim(bottom=0)
    times.set_ylabel("ms per iteration", labelpad=6)
    rates.set_ylabel(unit, labelpad=6)
    steps = [c["step_seconds"]["median"] * 1e3 for c in curve.points]
    if max(steps) >= _WIDE * min(steps):
        times.set_yscale("log", subs=(2, 5))
        times.set_ylim(min(steps) / 1.25, max(steps) * 1.25)
    for axis in (times.yaxis, rates.yaxis):
        axis.set_major_formatter("{x:,.6g}")
    times.yaxis.set_minor_formatter("{x:,.6g}")
    if curve.kind:
        _paint_linear(rates, curve, field)
    handles, labels = rates.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), 6)), frameon=False)
    title = textwrap.fill(curve.title, 96, break_long_words=False, break_on_hyphens=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _paint_line(axes: Any, name: str, points: Sequence[tuple[float, Any, Mapping[str, float]]], scale: float) -> None:
    if not points:
        return
    colour, marker, style = _look(points[0][1]["mode"])
    middle, below, above = (
        [scale * amount for amount in amounts]
        for amounts in zip(*((y["median"], y["median"] - y["low"], y["high"] - y["median"]) for _, _, y in points))
    )
    look = {"color": colour, "marker": marker, "linestyle": style, "markersize": 5, "linewidth": 1.6}
    axes.errorbar([x for x, _, _ in points], middle, [below, above], elinewidth=1.0, capsize=3, label=name, **look)


def _paint_linear(axes: Any, curve: Curve, field: str) -> None:
    """What the first variant would reach if every process added as much as the first does."""
    first = next(iter(curve.lines.values()))[0]
    if first is None or field not in first:
        return
    linear = [first[field]["median"] / int(curve.values[0]) * int(count) for count in curve.values]
    axes.plot(linear, color="#aaaaaa", linewidth=1, linestyle=(0, (1, 2)))
    look = {"ha": "right", "fontsize": 9, "color": "#777777"}
    axes.annotate("linear", (len(linear) - 1, linear[-1]), (-4, 4), textcoords="offset points", **look)
    axes.set_ylim(0, max(axes.get_ylim()[1], linear[-1] * 1.1))
