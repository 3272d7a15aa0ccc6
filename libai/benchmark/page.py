"""Render report.json as a Markdown page with a table for each config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libai.benchmark.report import format_spread


def to_page(report: Mapping[str, Any]) -> str:
    """Return the report as a Markdown page."""
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
