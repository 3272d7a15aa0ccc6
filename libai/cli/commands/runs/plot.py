"""Draw the curves of runs into one PNG or SVG file, from their metrics.jsonl. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from libai.cli.commands.runs.drawing import choose_tags, draw_curves, require_drawing
from libai.cli.commands.runs.records import read_curves
from libai.cli.parser import Parser


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    require_drawing(args.output)
    runs = {path: read_curves(Path(path)) for path in args.runs}
    draw_curves(runs, choose_tags(runs, args.tag), args.output)
    print(f"wrote {args.output}")
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the output folder of a run")
    parser.add_argument("--tag", action="append", help="a metric, such as eval/val/loss; may be given again")
    parser.add_argument("--output", "-o", type=Path, default=Path("curves.png"), help="default: curves.png")
    return parser
