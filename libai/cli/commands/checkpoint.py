"""List, verify, compare and convert checkpoints.

Does not need oneflow, and never executes what it reads.

    libai checkpoint ls out/gpt_stdlib
    libai checkpoint verify out/gpt_stdlib/checkpoints
    libai checkpoint diff out/gpt_stdlib/checkpoints/best out/gpt_stdlib
    libai checkpoint convert out/gpt_stdlib gpt.safetensors --dtype bfloat16

Exit codes: 0 success; 1 a checkpoint is damaged (ls, verify) or two checkpoints differ (diff); 2
invalid arguments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from libai import checkpoint
from libai.launch.command_line import Parser
from libai.utils.errors import UserError
from libai.utils.sizes import format_bytes


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    return args.run(args)


def _print(args: argparse.Namespace, value: object, lines: Iterable[str]) -> None:
    """Print `value` as JSON if --json is given, and `lines` otherwise."""
    print(json.dumps(value, indent=1) if args.json else "\n".join(lines))


def _list(args: argparse.Namespace) -> int:
    """Print one line per checkpoint: its iteration, size and health, and whether it is the best."""
    root = _existing(args.root)
    best = checkpoint.readable_best(root)
    rows = []
    lines = []
    for path in checkpoint.list_checkpoints(root):
        problems = checkpoint.verify(path, deep=False)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        is_best = best and best.path == path
        rows.append(
            {
                "name": path.name,
                "iteration": checkpoint.iteration_of(path.name),
                "bytes": size,
                "problems": problems,
                "best": {best.metric: best.value} if best and is_best else None,
            }
        )
        health = "damaged: " + "; ".join(problems) if problems else "ok"
        shown = f"  best {best.metric}={best.value:g}" if best and is_best else ""
        lines.append(f"{path.name}  {format_bytes(size):>9}  {health}{shown}")
    _print(args, rows, lines or [f"no checkpoints in {root}"])
    return 1 if any(row["problems"] for row in rows) else 0


def _verify(args: argparse.Namespace) -> int:
    """Read every byte and print the problems found."""
    results = {}
    for given in args.paths:
        path = _existing(given)
        for found in checkpoint.list_checkpoints(path) or [path]:
            results[str(found)] = checkpoint.verify(found)
    _print(
        args,
        results,
        [
            "\n  ".join([f"{name}: {'damaged' if bad else 'ok'}", *bad])
            for name, bad in results.items()
        ],
    )
    return 1 if any(results.values()) else 0


def _diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints bit by bit: the largest difference of each tensor, and the state key
    by key.
    """
    differences = checkpoint.diff(_open(args.a), _open(args.b))
    _print(
        args, differences, [f"{where}: {what}" for where, what in differences.items()] or ["equal"]
    )
    return 1 if differences else 0


def _convert(args: argparse.Namespace) -> int:
    """Write the weights to one safetensors file."""
    written = checkpoint.convert(_open(args.source), args.target, args.dtype)
    _print(args, {"written": str(written)}, [f"wrote {written}"])
    return 0


def _open(path: str) -> checkpoint.Checkpoint:
    return checkpoint.load(checkpoint.resolve(path))


def _existing(path: str) -> Path:
    """Return `path`, or the folder of checkpoints in it if it is the output folder of a run."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder. Give one such as out/gpt/checkpoints.")
    inside = folder / "checkpoints"
    return inside if inside.is_dir() else folder


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        sub.set_defaults(run=run)
        sub.add_flag("--json", "print JSON")
        return sub

    ls = command("ls", _list)
    ls.add_argument("root", help="folder of checkpoints or of a run")
    verify = command("verify", _verify)
    verify.add_argument(
        "paths", nargs="+", help="checkpoints, folders of checkpoints, or folders of runs"
    )
    one = (
        "a checkpoint, or a folder of checkpoints or of a run (its newest checkpoint; FOLDER/best "
        "selects the best)"
    )
    compare = command("diff", _diff)
    compare.add_argument("a", help=one)
    compare.add_argument("b", help=one)
    conversion = command("convert", _convert)
    conversion.add_argument("source", help=one)
    conversion.add_argument(
        "target", metavar="FILE.safetensors", help="output file, which must not exist yet"
    )
    conversion.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="cast floating tensors"
    )
    return parser
