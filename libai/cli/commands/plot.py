"""Draw the curves of runs into one PNG or SVG file, from their metrics.jsonl. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from libai.cli.parser import Parser
from libai.utils.errors import UserError

#: tag -> iterations and values
Curves = dict[str, tuple[list[int], list[float]]]


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    args = build_parser().parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("`libai plot` draws with matplotlib, which is not installed. Run `pip install matplotlib`.")
    if args.output.suffix not in (".png", ".svg"):
        raise UserError(f"--output {args.output}: it must end in .png or .svg.")
    runs = {path: read_curves(Path(path)) for path in dict.fromkeys(args.runs)}
    tags = args.tag or ["train/loss"]
    known = dict.fromkeys(tag for curves in runs.values() for tag in curves)
    if unknown := [tag for tag in tags if tag not in known]:
        raise UserError(f"--tag {unknown[0]}: no run has such a metric. There are {', '.join(known)}.")
    _draw(runs, tags, args.output)
    print(f"wrote {args.output}")
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the output folder of a run")
    parser.add_argument("--tag", action="append", help="a metric, such as eval/val/loss; may be given again")
    parser.add_argument("--output", "-o", type=Path, default=Path("curves.png"), help="default: curves.png")
    return parser


def read_curves(run: Path) -> Curves:
    """All metrics of a run's metrics.jsonl; `UserError` where there is none."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{run} holds no metrics: there is no metrics.jsonl in it. Give the output folder of a run.")
    curves: Curves = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that still writes
            continue
        for tag, value in row.items():
            if tag != "iter" and isinstance(value, (int, float)):
                iterations, values = curves.setdefault(tag, ([], []))
                iterations.append(row["iter"])
                values.append(value)
    return curves


def _draw(runs: dict[str, Curves], tags: Sequence[str], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(tags), 1, figsize=(8, 4 * len(tags)), squeeze=False, layout="constrained")
    for axis, tag in zip(axes[:, 0], tags):
        for name, curves in runs.items():
            if tag in curves:
                axis.plot(*curves[tag], label=name, marker="." if len(curves[tag][0]) < 30 else None)
        axis.set(xlabel="iteration", ylabel=tag)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
