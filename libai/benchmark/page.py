"""Render report.json as a Markdown page with a table for each config, and as an SVG chart."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from libai.benchmark.report import UNDECIDED, WITHIN_NOISE, format_spread

#: chart layout in pixels: left edge and maximum width of the bars
_LEFT, _WIDTH = 220, 480


def to_page(report: Mapping[str, Any]) -> str:
    """Return the report as a Markdown page, which shows the chart `report.svg` next to it."""
    lines = ["# Benchmark", "", f"`{report['command']}`", ""]
    for part in ("machine", "settings"):
        facts = [f"{name} {value}" for name, value in report[part].items()]
        lines.append(f"* {part}: {', '.join(facts)}")
    lines += [
        "* Every variant runs in its own process, and their blocks alternate. Figures are "
        "medians over blocks, and ratios are medians over paired blocks; ± is half of the 95 % "
        "interval. The first iteration (`first s`) compiles and is not counted. Losses were "
        "compared before the measurement; the learning rate is constant. `of matmul` is the "
        "fraction of the speed of the variants' fastest large matmul in the same round, with the "
        "same number of threads.",
        "\n![milliseconds per iteration](report.svg)\n",
    ]
    for case in report["cases"]:
        head, *rows = (f"| {' | '.join(row)} |" for row in to_rows(case))
        lines += [f"\n## {case['title']}\n", head, "|---|" + "--:|" * head.count(" | "), *rows, ""]
        lines += [f"* {note}" for note in case["notes"]]
    return "\n".join([*lines, ""])


def to_rows(case: Mapping[str, Any]) -> list[list[str]]:
    """Return the table for one config: a header row, then one row for each variant that ran."""
    measured = [row for row in case["variants"] if row["blocks"]]
    tokens = max(row["tokens_per_iter"] or 0 for row in measured)
    rows = [
        ["variant", "ms/iter", "ratio", "verdict", "samples/s", "of matmul", "first s", "RSS MiB"]
    ]
    if tokens:
        rows[0][4] = "tokens/s"
    for row in measured:
        rows.append(
            [
                row["name"],
                format_spread(row["step_seconds"], 1e3),
                format_spread(row["ratio"]),
                row["verdict"],
                f"{(tokens or row['samples_per_iter']) / row['step_seconds']['median']:,.0f}",
                f"{row['matmul_share']:.0%}" if row["matmul_share"] else "",
                f"{row['first_seconds']:.2f}",
                f"{(row['peak_rss_bytes'] or 0) / 2**20:,.0f}",
            ]
        )
    rows[1][2] = "1"
    return rows


def to_picture(report: Mapping[str, Any]) -> str:
    """Return an SVG bar chart of milliseconds per iteration with intervals.

    Bars without a clear verdict are pale.
    """
    parts = []
    y = 0
    for case in report["cases"]:
        rows = [row for row in case["variants"] if row["blocks"]]
        scale = _WIDTH / max(row["step_seconds"]["high"] for row in rows)
        parts.append(f'<text y="{y + 15}" font-weight="bold">{escape(case["title"])}</text>')
        for row in rows:
            y += 22
            step = row["step_seconds"]
            low, middle, high = (_LEFT + step[end] * scale for end in ("low", "median", "high"))
            color = "lightsteelblue" if row["verdict"] in (WITHIN_NOISE, UNDECIDED) else "steelblue"
            parts.append(
                f'<text x="4" y="{y + 15}">{escape(row["name"])}: {format_spread(step, 1e3)} '
                f'ms</text><path d="M{_LEFT} {y + 11}H{middle:.1f}" stroke="{color}" '
                f'stroke-width="14"/><path d="M{low:.1f} {y + 11}H{high:.1f}" stroke="black" '
                'stroke-width="2"/>'
            )
        y += 44
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH}" height="{y}" '
        'font-family="sans-serif" '
    )
    return "\n".join(
        [
            head + 'font-size="12"><rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )
