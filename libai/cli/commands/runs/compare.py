"""Compare runs: the settings and versions that differ, their last metrics and, with --output, their curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from libai.cli.commands.runs.drawing import choose_tags, draw_curves, require_drawing
from libai.cli.commands.runs.records import Record, differing, format_table, read_record, show
from libai.cli.parser import Parser
from libai.utils.errors import UserError


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    names = list(dict.fromkeys(args.runs))
    if len(names) < 2:
        raise UserError(f"{names[0]} is the only run: name at least two to compare. `libai plot` draws one alone.")
    if args.output:
        require_drawing(args.output)
    records = {name: read_record(Path(name)) for name in names}
    curves = {name: record.curves for name, record in records.items()}
    tags = choose_tags(curves, args.tag) if args.tag or args.output else []
    print(describe_differences(records))
    print()
    print(describe_metrics(records, args.tag))
    if args.output:
        draw_curves(curves, tags, args.output)
        print(f"\nwrote {args.output}")
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the output folder of a run")
    parser.add_argument("--tag", action="append", help="only this metric; may be given again")
    parser.add_argument("--output", "-o", type=Path, help="draw the curves of --tag (default train/loss): .png or .svg")
    return parser


def describe_differences(records: dict[str, Record]) -> str:
    """A table of what differs between runs, one column for each."""
    found = differing([{**record.settings, **record.facts} for record in records.values()])
    if not found:
        return "All settings and versions are equal."
    return format_table(["differs", *records], [[key, *values] for key, values in found.items()])


def describe_metrics(records: dict[str, Record], tags: Sequence[str] | None = None) -> str:
    """A table of the last value of each metric, one column for each run."""
    last = [record.final_metrics for record in records.values()]
    shown = tags or dict.fromkeys(tag for metrics in last for tag in metrics)
    rows = [[tag, *(show(metrics[tag]) if tag in metrics else "-" for metrics in last)] for tag in shown]
    ends = [
        ["status", *(record.status for record in records.values())],
        ["iterations", *(str(_iterations(record)) for record in records.values())],
    ]
    return format_table(["last value", *records], [*ends, *rows])


def _iterations(record: Record) -> int:
    return max((iterations[-1] for iterations, _ in record.curves.values()), default=0)
