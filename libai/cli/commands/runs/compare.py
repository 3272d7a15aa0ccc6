"""Compare runs: the settings and versions that differ, and the last value of each metric.

With --output also one HTML page with the curves, which refers to nothing outside of it. One run alone has a page, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.cli.commands.runs.page import page_of
from libai.cli.commands.runs.records import MISSING, Record, differing, read_record, show
from libai.utils.atomic import atomic_write_text
from libai.utils.errors import UserError
from libai.utils.parser import Parser
from libai.utils.tables import format_table


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    args = build_parser().parse_args(arguments)
    if args.output and args.output.suffix != ".html":
        raise UserError(f"--output {args.output}: it must end in .html.")
    records = {name: read_record(Path(name)) for name in args.runs}
    tables = {"Settings that differ": settings_table(records), "Last values": metrics_table(records)}
    if args.json:
        print(json.dumps(as_json(records), indent=1))
    else:
        print("\n\n".join(format_table(rows) for rows in tables.values()))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        curves = {name: record.curves for name, record in records.items()}
        atomic_write_text(args.output, page_of(tables, curves))
        if not args.json:
            print(f"\nwrote {args.output}")
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the output folder of a run")
    parser.add_argument("--output", "-o", type=Path, metavar="PAGE.html", help="write a page with curves as well")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def settings_table(records: dict[str, Record]) -> list[list[str]]:
    """A header, and a row for each setting or version that differs between runs."""
    rows = [["differs", *records]]
    for key, values in differing([record.all_settings for record in records.values()]).items():
        rows.append([key, *("-" if value is MISSING else show(value) for value in values)])
    if len(rows) == 1:
        rows.append(["nothing", *("" for _ in records)])
    return rows


def metrics_table(records: dict[str, Record]) -> list[list[str]]:
    """A header, how each run ended, and a row for each metric."""
    found = list(records.values())
    rows = [
        ["last value", *records],
        ["status", *(record.status for record in found)],
        ["iterations", *(str(record.iterations) for record in found)],
    ]
    for tag in dict.fromkeys(tag for record in found for tag in record.final_metrics):
        values = [record.final_metrics.get(tag) for record in found]
        rows.append([tag, *("-" if value is None else show(value) for value in values)])
    return rows


def as_json(records: dict[str, Record]) -> dict[str, Any]:
    """The same values, unrounded."""
    runs = {}
    for name, record in records.items():
        # JSON has no NaN
        metrics = {tag: value if math.isfinite(value) else None for tag, value in record.final_metrics.items()}
        runs[name] = {"status": record.status, "iterations": record.iterations, "metrics": metrics}
    differs = {}
    for key, values in differing([record.all_settings for record in records.values()]).items():
        differs[key] = {name: value for name, value in zip(records, values) if value is not MISSING}
    return {"runs": runs, "differs": differs}
