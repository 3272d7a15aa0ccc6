"""A report as text: a Markdown table with notes for each case, and the page of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from libai.benchmark.measure import ROUNDING_FACTOR
from libai.utils.atomic import atomic_write_text

#: in place of a figure that there is not
NOT_AVAILABLE = "n/a"
#: with fewer, a median and its interval say nothing
LEAST_ROUNDS = 3
#: column → (field of a variant with a spread, factor, unit)
_FIGURES = {
    "ms/iter": ("step_seconds", 1e3, ""),
    "ratio": ("ratio", 1.0, ""),
    "CPU ms": ("cpu_seconds", 1e3, ""),
    "CPU ratio": ("cpu_ratio", 1.0, ""),
    "samples/s": ("samples_per_s", 1.0, ""),
    "tokens/s": ("tokens_per_s", 1.0, ""),
    "GFLOP/s": ("flops_per_s", 1e-9, ""),
    "of peak": ("peak_share", 100.0, " %"),
}


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page of a report."""
    parts = ["# Benchmark", "", *machine_lines(report), ""]
    for title, lines in to_sections(report):
        parts += [f"## {title}", "", *lines, ""]
    atomic_write_text(path, "\n".join(parts))


def machine_lines(report: Mapping[str, Any]) -> list[str]:
    """What ran where and how, as a Markdown list."""
    machine, settings = report["machine"], report["settings"]
    few = [f"* **A smoke run of {settings['rounds']} rounds: its figures mean nothing.**"]
    return [
        *(few if settings["rounds"] < LEAST_ROUNDS else []),
        f"* Command: `{report['command']}`",
        f"* Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gb')} GB; "
        f"{machine.get('os')}; devices: {machine.get('devices') or 'none but the CPU'}",
        f"* Software: libai {machine.get('libai')} ({machine.get('commit')}), oneflow {machine.get('oneflow')} "
        f"(OpenBLAS {machine.get('openblas', 'bundled')}, CPU kernels {machine.get('cpu_kernels', 'its own')}; "
        f"stock variants have those of the wheel), python {machine.get('python')}",
        f"* Load average when it began: {machine.get('load')}",
        f"* Every variant is a process of its own; they are interleaved, {settings['rounds']} rounds of blocks of "
        f"about {settings['block_seconds']:g} s. Figures are medians over blocks, ratios medians over rounds of paired "
        "blocks; ± is half of the 95 % interval of the median. The first iteration (`first s`), which compiles, is not "
        "among them.",
        "* `CPU ms`: processor time of an iteration, all processes added up; a busy machine changes it less. "
        "`launch s`: from the start of the command to the end of the first iteration.",
        f"* Their losses agreed in the first {settings['check_iterations']} iterations to "
        f"{settings['loss_tolerance']:g} (relative). The learning rate is constant.",
        "* RSS is the largest resident memory of the variant's processes, added up: shared pages count in each.",
    ]


def to_sections(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """`(title, lines of Markdown)` of each case."""
    cores = report["machine"]["cores"]
    for case in report["cases"]:
        notes = [f"* {line}" for line in case_notes(case, cores)]
        yield case["title"], [*case_table(case), "", *notes]


def case_table(case: Mapping[str, Any]) -> list[str]:
    """One row per variant; spreads as `median ±uncertainty`."""
    variants = case["variants"]
    columns = {"variant": [c["name"] for c in variants]}
    for title, (field, scale, unit) in _FIGURES.items():
        columns[title] = [format_spread(c.get(field), scale, unit) for c in variants]
    for row, c in enumerate(variants):  # the one that others of as many processes are compared to
        if not (c["unavailable"] or c["is_peak"] or "ratio" in c):
            columns["ratio"][row] = "1"
            columns["CPU ratio"][row] = "1" if "cpu_seconds" in c else NOT_AVAILABLE
    columns["first s"] = [NOT_AVAILABLE if c["unavailable"] else f"{c['first_seconds']:.2f}" for c in variants]
    columns["launch s"] = [NOT_AVAILABLE if c["unavailable"] else f"{c['launch_seconds']:.1f}" for c in variants]
    sizes = [c.get("peak_rss_bytes") for c in variants]
    columns["RSS MiB"] = [f"{size / 2**20:,.0f}" if size else NOT_AVAILABLE for size in sizes]
    return _markdown(columns)


def _markdown(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A table whose columns stand in line on a screen too; one that holds no figure is left out."""
    filled = {title: cells for title, cells in columns.items() if any(cell != NOT_AVAILABLE for cell in cells)}
    widths = [max(map(len, [title, *cells])) for title, cells in filled.items()]
    lines = []
    for first, *others in [list(filled), *zip(*filled.values())]:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        lines.append(f"| {' | '.join(cells)} |")
    ruler = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [lines[0], f"|{'|'.join(ruler)}|", *lines[1:]]


def case_notes(case: Mapping[str, Any], cores: int) -> list[str]:
    """What a reader of the table must know: noise, break-even, scaling, who did not take part, what is n/a."""
    lines = []
    for processes, noise in case["noise"].items():
        lines.append(
            f"Noise with {processes} process(es): {noise['floor']:.1%}, between two interleaved runs of "
            f"{noise['variant']} (ratio {format_spread(noise['ratio'])}). Smaller differences mean nothing."
        )
        if noise["cpu_floor"] is not None:
            lines[-1] += f" Of processor time: {noise['cpu_floor']:.1%}."
    lines.append(_load_line(case["loads"], cores))
    if max(case["loads"]) > cores + 1:
        lines.append(
            "The machine was busy with other work: one that computes in several threads gets a larger share of it, "
            "which wall times (and the break-even) count in its favour. Believe the processor times, and measure again."
        )
    if not case["noise"]:
        lines.append("Noise: not measured, there was no second run of a variant.")
    waits = [c for c in case["variants"] if "data_share" in c and not c["is_peak"]]
    if waits:
        shares = ", ".join(f"{c['name']} {c['data_share']['median']:.2%}" for c in waits)
        lines.append(f"Share of an iteration spent waiting for data: {shares}.")
    rounding = case.get("rounding")
    if rounding:
        lines.append(
            f"Losses of {' and '.join(rounding['variants'])} diverge by {rounding['difference']:.1e} in iteration "
            f"{rounding['iteration']}: this training amplifies rounding. A change in the last bit of its weights makes "
            f"{rounding['allowed'] / ROUNDING_FACTOR:.1e} there; {ROUNDING_FACTOR:g} times as much was allowed."
        )
    lines += [f"Break-even: {point['reason']}." for point in case["break_even"]]
    for row in case["scaling"]:
        what = "the peak itself scales" if row["kind"] == "peak" else f"{row['kind']} scaling"
        lines.append(
            f"{row['variant']} against {row['to']}, {what}: {format_spread(row['speedup'])} "
            f"times the throughput, efficiency {format_spread(row['efficiency'], 100.0, unit=' %')}."
        )
    for c in case["variants"]:
        lines += _variant_notes(c)
    return [*lines, *_missing(case)]


def _load_line(loads: Sequence[float], cores: int) -> str:
    return f"Load average in the rounds: {min(loads):.1f} to {max(loads):.1f} on {cores} cores."


def _variant_notes(c: Mapping[str, Any]) -> Iterator[str]:
    name = c["name"]
    if c["unavailable"]:
        yield f"{name} took no part: {c['unavailable'].rstrip('.')}."
        return
    if "build_seconds" in c:
        yield f"{name}: {c['build_seconds']:.2f} s of its first iteration are compilation."
    if "device_bytes" in c:
        yield f"{name} had {c['device_bytes'] / 2**20:,.0f} MiB of the device in use."
    if c.get("disturbs_others"):
        yield f"{name} used {c['idle_share']:.0%} of a core while it waited, which disturbs the others."


def _missing(case: Mapping[str, Any]) -> list[str]:
    """Each reason once, with the figures and variants that it is about."""
    reasons: dict[tuple[str, str], list[str]] = {}
    present = [c for c in case["variants"] if not c["unavailable"] and not c["is_peak"]]
    for c in present:
        for figure, reason in c["missing"].items():
            reasons.setdefault((figure, reason), []).append(c["name"])
    return [
        f"{figure} n/a{'' if len(names) == len(present) else ' for ' + ', '.join(names)}: {reason}."
        for (figure, reason), names in reasons.items()
    ]


def format_spread(estimate: Mapping[str, Any] | None, scale: float = 1.0, unit: str = "") -> str:
    """`12.3 ±4.0%`: a median and how far it may be off, half of its 95 % interval relative to it."""
    if not estimate:
        return NOT_AVAILABLE
    median = estimate["median"]
    off = (estimate["high"] - estimate["low"]) / 2 / median if median else 0.0
    shown = f"{short(median * scale)}{unit}"
    return f"{shown} ±{off:.0%}" if off >= 0.095 else f"{shown} ±{off:.1%}"


def short(value: float) -> str:
    """Three digits, or whole thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
