"""Plots of a report as PNG and SVG: bars with error bars, the break-even chart, curves over a sweep, scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from libai.benchmark.curve_plots import paint_curve
from libai.benchmark.curves import find_curves, is_in_a_curve
from libai.benchmark.plot_style import COLOURS, OTHER_COLOUR, STYLE
from libai.utils.errors import UserError


@dataclass(frozen=True)
class Plot:
    """A plot that a report gives.

    about: title of what it shows. size: in inches. paint: fills a figure. is_main: one that a page shows.
    """

    name: str
    about: str
    size: tuple[float, float]
    paint: Callable[[Any], None]
    is_main: bool = True


def require_matplotlib() -> None:
    """Raise `UserError` when plots cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "plots need matplotlib, which is not installed: pip install matplotlib, or --no-plots."
        ) from None


def plan_plots(report: Mapping[str, Any]) -> list[Plot]:
    """All plots of a report. Cases of a sweep have their curve, and nothing of their own."""
    found: list[Plot] = []
    curves = find_curves(report)
    drawn_as_curves = [case["title"] for curve in curves for case in curve.cases]
    cases = [case for case in report["cases"] if not is_in_a_curve(case, curves)]
    for number, case in enumerate(cases, start=1):
        suffix = "" if len(cases) == 1 else f"_{number}"
        is_main = case["title"] not in drawn_as_curves
        size = (8.0, 1.4 + 0.42 * len(_shown(case)))
        found.append(Plot(f"times{suffix}", case["title"], size, _on_axes(partial(_bars, case=case)), is_main))
        for index, pair in enumerate(case["break_even"]):
            name = f"break_even{suffix}" + ("" if index == 0 else f"_{pair['contender'].replace(' ', '_')}")
            paint = partial(_cumulative, case=case, pair=pair)
            found.append(Plot(name, case["title"], (7.0, 4.2), _on_axes(paint), is_main and index == 0))
        if case["scaling"]:
            paint = partial(_scaling, case=case)
            found.append(Plot(f"scaling{suffix}", case["title"], (7.0, 4.2), _on_axes(paint), is_main))
    for curve in curves:
        found.append(Plot(f"curve_{curve.name}", curve.title, (9.0, 4.2), partial(paint_curve, curve=curve)))
    return found


def draw(
    report: Mapping[str, Any],
    folder: Path,
    kinds: tuple[str, ...] = ("png", "svg"),
    prefix: str = "",
    only_main: bool = False,
) -> dict[str, list[Path]]:
    """Draw all that a report gives, or what a page shows of it, into `folder`.

    Returns title -> the files about it, one of each kind per plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files: dict[str, list[Path]] = {}
    with pyplot.rc_context(STYLE):
        for plot in plan_plots(report):
            if only_main and not plot.is_main:
                continue
            figure = pyplot.figure(figsize=plot.size, layout="constrained")
            plot.paint(figure)
            for kind in kinds:
                metadata = {"Date": None} if kind == "svg" else None  # the same report gives the same bytes
                file = folder / f"{prefix}{plot.name}.{kind}"
                figure.savefig(file, dpi=150, metadata=metadata)
                files.setdefault(plot.about, []).append(file)
            pyplot.close(figure)
    return files


def _on_axes(paint: Callable[[Any], None]) -> Callable[[Any], None]:
    """A painter of figures from one of a single panel."""
    return lambda figure: paint(figure.subplots())


def _shown(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [c for c in case["contenders"] if not c["unavailable"] and not c["is_peak"]]


def _bars(axes: Any, case: Mapping[str, Any]) -> None:
    """Milliseconds per iteration; the whiskers are the 10th and 90th percentile of the blocks."""
    contenders = _shown(case)[::-1]
    medians = [c["step_seconds"]["median"] * 1e3 for c in contenders]
    below = [m - min(m, c["step_seconds"]["p10"] * 1e3) for m, c in zip(medians, contenders)]
    above = [max(m, c["step_seconds"]["p90"] * 1e3) - m for m, c in zip(medians, contenders)]
    bars = axes.barh(
        [c["name"] for c in contenders],
        medians,
        xerr=[below, above],
        color=[COLOURS.get(c["mode"], OTHER_COLOUR) for c in contenders],
        error_kw={"ecolor": "#8c8c8c", "elinewidth": 1.2, "capsize": 3},  # seen on dark bars and on paper
        height=0.66,
    )
    for bar, contender in zip(bars, contenders):
        if contender["twin_of"]:
            bar.set_hatch("///")
            bar.set_edgecolor("white")
    for row, (median, high) in enumerate(zip(medians, above)):
        axes.annotate(
            f"{median:,.0f}" if median >= 1000 else f"{median:.3g}",
            (median + high, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms per iteration (median; whiskers: 10th to 90th percentile of the blocks)")
    _title(axes, case)


def _cumulative(axes: Any, case: Mapping[str, Any], pair: Mapping[str, Any]) -> None:
    """Seconds until an iteration is done, compilation included, for a compiled contender and its eager one."""
    import numpy as np

    by_name = {c["name"]: c for c in case["contenders"]}
    pays = pair["iterations"]
    end = max(20.0, 2.5 * pays) if pays else 200.0
    iterations = np.array([1.0, end])
    for name in (pair["baseline"], pair["contender"]):
        contender = by_name[name]
        step, colour = contender["step_seconds"], COLOURS.get(contender["mode"], OTHER_COLOUR)

        def at(quantile: str, step: Mapping[str, float] = step, first: float = contender["first_seconds"]) -> Any:
            return first + (iterations - 1) * step[quantile]

        axes.fill_between(iterations, at("low"), at("high"), color=colour, alpha=0.25, linewidth=0)
        axes.plot(iterations, at("median"), color=colour, linewidth=2, label=name)
    if pays:
        axes.axvline(pays, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(f"after {pays}", (pays, axes.get_ylim()[1]), (5, -12), textcoords="offset points", fontsize=9)
    axes.set_xlabel("iterations")
    axes.set_ylabel("seconds, compilation included")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    _title(axes, case, pair["reason"])


def _scaling(axes: Any, case: Mapping[str, Any]) -> None:
    names = [row["contender"] for row in case["scaling"]]
    values = [row["efficiency"]["median"] * 100 for row in case["scaling"]]
    below = [max(0.0, v - row["efficiency"]["low"] * 100) for v, row in zip(values, case["scaling"])]
    above = [max(0.0, row["efficiency"]["high"] * 100 - v) for v, row in zip(values, case["scaling"])]
    axes.bar(
        names, values, yerr=[below, above], color="#1f4e8c", width=0.6, error_kw={"capsize": 3, "ecolor": "#444444"}
    )
    axes.axhline(100, color="#888888", linestyle="--", linewidth=1)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("efficiency, % of linear")
    axes.tick_params(axis="x", labelrotation=20)
    kinds = sorted({row["kind"] for row in case["scaling"]} - {"peak"})
    _title(axes, case, f"{' and '.join(kinds)} scaling (bars: 95 % interval)")


def _title(axes: Any, case: Mapping[str, Any], under: str = "") -> None:
    axes.set_title(case["title"] + (f"\n{under}" if under else ""), loc="left", fontsize=10)
