"""Plots of a report as PNG and SVG: bars with error bars, the break-even chart, curves over a sweep, scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from libai.utils.errors import UserError

#: one hue per family; the eager and the graph member of a family share it, the compiled one is the darker
_COLOURS = {
    "eager": "#7aa6dc",
    "graph": "#1f4e8c",
    "raw-eager": "#9ccc9c",
    "raw-eager-sync": "#c9e4c5",
    "raw-graph": "#2f7d4f",
    "raw-graph-sync": "#5fa777",
    "eager-stock": "#e3b787",
    "graph-stock": "#b0702a",
    "command": "#a884c4",
}
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#888888",
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "libai",
}


def require_matplotlib() -> None:
    """Raise `UserError` when plots cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "plots need matplotlib, which is not installed: pip install matplotlib, or --no-plots."
        ) from None


def draw(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all that a report gives into `folder`; returns the files, a PNG and an SVG of each plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files: list[Path] = []

    def plot(name: str, size: tuple[float, float], paint: Callable[[Any], None]) -> None:
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        paint(axes)
        for kind in ("png", "svg"):
            metadata = {"Date": None} if kind == "svg" else None  # the same report gives the same bytes
            files.append(folder / f"{name}.{kind}")
            figure.savefig(files[-1], dpi=150, metadata=metadata)
        pyplot.close(figure)

    with pyplot.rc_context(_STYLE):
        for number, case in enumerate(report["cases"], start=1):
            suffix = "" if len(report["cases"]) == 1 else f"_{number}"
            count = len(_shown(case))
            plot(f"times{suffix}", (8.0, 1.4 + 0.42 * count), partial(_bars, case=case))
            for index, pair in enumerate(case["break_even"]):
                name = f"break_even{suffix}" + ("" if index == 0 else f"_{pair['contender'].replace(' ', '_')}")
                plot(name, (7.0, 4.2), partial(_cumulative, case=case, pair=pair))
            if case["scaling"]:
                plot(f"scaling{suffix}", (7.0, 4.2), partial(_scaling, case=case))
        for config, cases in _sweeps(report).items():
            plot(f"sweep_{Path(config).stem}", (7.0, 4.4), partial(_curves, cases=cases))
    return files


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
        color=[_COLOURS.get(c["mode"], "#999999") for c in contenders],
        error_kw={"ecolor": "#444444", "elinewidth": 1.0, "capsize": 3},
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
    iterations = np.linspace(1, end, 200)
    for name in (pair["baseline"], pair["contender"]):
        contender = by_name[name]
        step, colour = contender["step_seconds"], _COLOURS.get(contender["mode"], "#999999")

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


def _sweeps(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Config -> its cases, where a sweep gave it at least two."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in report["cases"]:
        if case["sweep"] is not None:
            found.setdefault(case["config"], []).append(case)
    return {config: cases for config, cases in found.items() if len(cases) > 1}


def _curves(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """Milliseconds per iteration over the values of the sweep, one line per contender."""
    values = [case["sweep"]["value"] for case in cases]
    try:
        places = [float(value) for value in values]
    except ValueError:  # names, not numbers: evenly spaced
        places = [float(number) for number in range(len(values))]
        axes.set_xticks(places, values)
    else:
        axes.set_xticks(places)
    for name in dict.fromkeys(c["name"] for case in cases for c in _shown(case) if not c["twin_of"]):
        points = [(x, c) for x, case in zip(places, cases) for c in _shown(case) if c["name"] == name]
        medians = [c["step_seconds"]["median"] * 1e3 for _, c in points]
        below = [c["step_seconds"]["median"] * 1e3 - c["step_seconds"]["low"] * 1e3 for _, c in points]
        above = [c["step_seconds"]["high"] * 1e3 - c["step_seconds"]["median"] * 1e3 for _, c in points]
        colour = _COLOURS.get(points[0][1]["mode"], "#999999")
        axes.errorbar([x for x, _ in points], medians, [below, above], color=colour, marker="o", capsize=3, label=name)
    axes.set_xlabel(cases[0]["sweep"]["key"])
    axes.set_ylabel("ms per iteration (median, 95 % interval)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.set_title(cases[0]["config"], loc="left", fontsize=11, fontweight="bold")


def _title(axes: Any, case: Mapping[str, Any], under: str = "") -> None:
    axes.set_title(case["title"] + (f"\n{under}" if under else ""), loc="left", fontsize=10)
