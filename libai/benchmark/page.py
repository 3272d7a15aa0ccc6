"""A report for people: a Markdown page with a table for each config, and a picture (SVG). Made from the JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from libai.benchmark.report import WITHIN_NOISE, estimate, format_spread

#: with fewer rounds, a median and its interval say nothing
LEAST_ROUNDS = 3
#: pixels of the picture: width of the names, of the bars and of the figures; height of a line
_NAMES, _BARS, _FIGURES, _LINE = 170, 420, 130, 22


def to_page(report: Mapping[str, Any], picture: str) -> str:
    """Return the Markdown page of a report; `picture`: the file name of its picture."""
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    lines = [
        *("# Benchmark", "", f"* Command: `{report['command']}`", f"* Machine: {machine}", f"* Settings: {settings}"),
        "* Every variant is a process of its own; they are interleaved, block by block. Figures are medians over "
        "blocks, ratios medians over paired blocks; ± is half of the 95 % interval. The first iteration (`first s`) "
        "compiles and is not among them. All losses agreed first; the learning rate is constant.",
        *("", f"![milliseconds per iteration]({picture})", ""),
    ]
    if report["settings"]["rounds"] < LEAST_ROUNDS:
        lines[2:2] = ["* **A smoke run: its figures mean nothing.**"]
    for case in report["cases"]:
        head, *rows = (f"| {' | '.join(row)} |" for row in to_rows(case))
        lines += [f"## {case['title']}", "", head, "|---|" + "--:|" * head.count(" | "), *rows, ""]
        lines += [*[f"* {note}" for note in case["notes"]], ""]
    return "\n".join(lines)


def to_rows(case: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of a config: a head, and a row for each variant that took part."""
    measured = [row for row in case["variants"] if row["blocks"]]
    tokens = max(row["tokens_per_iter"] or 0 for row in measured)
    rate = "tokens/s" if tokens else "samples/s"
    rows = [["variant", "ms/iter", "ratio", "verdict", "CPU ms", rate, "first s", "RSS MiB"]]
    for row in measured:
        cpu = format_spread(estimate(row["cpu_blocks"]), 1e3) if row["cpu_blocks"] else ""
        peak = f"{row['peak_rss_bytes'] / 2**20:,.0f}" if row["peak_rss_bytes"] else ""
        work = tokens or row["samples_per_iter"]
        rows.append(
            [
                *(
                    row["name"],
                    format_spread(row["step_seconds"], 1e3),
                    format_spread(row["ratio"]),
                    row["verdict"],
                    cpu,
                ),
                *(f"{work / row['step_seconds']['median']:,.0f}", f"{row['first_seconds']:.2f}", peak),
            ]
        )
    rows[1][2] = "1"
    return rows


def to_picture(report: Mapping[str, Any]) -> str:
    """Return an SVG: for each variant a bar of milliseconds per iteration with its interval; paler within the noise."""
    parts = []
    y = 0
    for case in report["cases"]:
        rows = [row for row in case["variants"] if row["blocks"]]
        scale = _BARS / max(row["step_seconds"]["high"] for row in rows)
        parts.append(f'<text x="4" y="{y + 15}" font-weight="bold">{escape(case["title"])}</text>')
        for row in rows:
            y += _LINE
            step = row["step_seconds"]
            low, high = (_NAMES + step[end] * scale for end in ("low", "high"))
            color = "#b8c9dc" if row["verdict"] == WITHIN_NOISE else "#4878a8"
            parts += [
                f'<text x="{_NAMES - 6}" y="{y + 15}" text-anchor="end">{escape(row["name"])}</text>',
                f'<rect x="{_NAMES}" y="{y + 4}" width="{step["median"] * scale:.1f}" height="14" fill="{color}"/>',
                f'<path d="M{low:.1f} {y + 11}H{high:.1f}" stroke="black" stroke-width="2"/>',
                f'<text x="{high + 6:.1f}" y="{y + 15}">{format_spread(step, 1e3)} ms</text>',
            ]
        y += 2 * _LINE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_NAMES + _BARS + _FIGURES}" height="{y}" '
    style = 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head + style, *parts, "</svg>", ""])
