"""Look at checkpoints, check, compare, convert and delete them. Needs no oneflow and executes nothing it reads.

    ls out/gpt/checkpoints
    verify out/gpt/checkpoints/iter_0000200
    diff A B
    convert out/gpt/checkpoints/best gpt.safetensors --dtype bfloat16

Exit codes: 0 fine; 1 a checkpoint is damaged (verify, ls) or two differ (diff); 2 a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libai import checkpoint
from libai.utils.errors import UserError
from libai.utils.parser import Parser
from libai.utils.sizes import format_bytes


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    return args.run(args)


def _print(args: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    """Print a result: `value` as JSON with --json, else `lines`."""
    print(json.dumps(value, indent=1) if args.json else "\n".join(lines))


def _list(args: argparse.Namespace) -> int:
    """One line per checkpoint: iteration, size, state of health, best or not."""
    root = _existing(args.root)
    try:
        best = checkpoint.read_best(root)
    except checkpoint.CheckpointError as error:  # it only hints; the list is still worth having
        best = None
        print(f"warning: {error}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    lines = []
    for path in checkpoint.list_checkpoints(root):
        problems = checkpoint.verify(path, deep=False)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        is_best = best is not None and best.path == path
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
    """Read every byte and say what is wrong."""
    results = {}
    for given in args.paths:
        path = _existing(given)
        is_one = checkpoint.iteration_of(path.name) is not None or not checkpoint.list_checkpoints(path)
        for found in [path] if is_one else checkpoint.list_checkpoints(path):
            results[str(found)] = checkpoint.verify(found)
    _print(
        args, results, ["\n  ".join([f"{name}: {'damaged' if bad else 'ok'}", *bad]) for name, bad in results.items()]
    )
    return 1 if any(results.values()) else 0


def _show(args: argparse.Namespace) -> int:
    """Iteration, parts of the state and every tensor's dtype, shape and size; `--stats` reads the data too."""
    loaded = _open(args.path)
    lines = [f"{loaded.path}  iteration {loaded.iteration}", f"state: {', '.join(loaded.state)}"]
    groups: dict[str, dict[str, Any]] = {}
    for name, group in loaded.tensors.items():
        groups[name] = {}
        total = sum(group.spec(tensor).num_bytes for tensor in group)
        lines.append(f"{name}: {len(group)} tensors, {format_bytes(total)}")
        for tensor in group:
            spec = group.spec(tensor)
            stats = _stats(group[tensor]) if args.stats and spec.num_bytes else {}
            # JSON has no number for NaN
            numbers = {key: value if np.isfinite(value) else None for key, value in stats.items()}
            facts = {"dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.num_bytes}
            groups[name][tensor] = {**facts, **numbers}
            shown = "".join(f"  {key} {value:.6g}" for key, value in stats.items())
            lines.append(f"  {tensor}  {spec.dtype} {spec.shape}{shown}")
    found = {"path": str(loaded.path), "iteration": loaded.iteration, "state": loaded.state, "tensors": groups}
    _print(args, found, lines)
    return 0


def _stats(array: np.ndarray) -> dict[str, float]:
    values = array.astype(np.float64)
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def _diff(args: argparse.Namespace) -> int:
    """Return how two checkpoints differ: tensors by largest difference, state by key."""
    differences = checkpoint.diff(_open(args.a), _open(args.b), args.tolerance)
    _print(args, differences, [f"{where}: {what}" for where, what in differences.items()] or ["equal"])
    return 1 if differences else 0


def _convert(args: argparse.Namespace) -> int:
    """Write a copy: one safetensors file of the weights, or a checkpoint in another folder."""
    if args.shard_mb is not None and args.target.endswith(".safetensors"):
        raise UserError(f"{args.target} is one file, for which --shard-mb does nothing. Leave it out.")
    shard_mb = 64.0 if args.shard_mb is None else args.shard_mb
    if not shard_mb > 0:
        raise UserError(f"--shard-mb {shard_mb:g}: it must be greater than 0.")
    shard_bytes = int(min(shard_mb * 1e6, 2.0**62))
    source = _open(args.source)
    written = checkpoint.convert(source, args.target, dtype=args.dtype, drop=args.drop, shard_bytes=shard_bytes)
    _print(args, {"written": str(written)}, [f"wrote {written}"])
    return 0


def _prune(args: argparse.Namespace) -> int:
    """Delete old checkpoints; never the best, the protected ones or the newest that verifies."""
    deleted = checkpoint.prune(_existing(args.root), args.max_to_keep, args.protect, is_dry_run=args.dry_run)
    done = "would delete" if args.dry_run else "deleted"
    found = {"deleted": [str(path) for path in deleted], "dry_run": args.dry_run}
    _print(args, found, [f"{done} {path}" for path in deleted] or ["nothing to delete"])
    return 0


def _open(path: str) -> checkpoint.Checkpoint:
    return checkpoint.load(checkpoint.resolve(_of_run(path)))


def _existing(path: str) -> Path:
    if not Path(path).is_dir():
        raise UserError(f"{path} is not a folder. Give one such as out/gpt/checkpoints.")
    return _of_run(path)


def _of_run(path: str) -> Path:
    """`path`, or the checkpoints of the run whose output folder it is."""
    inside = Path(path) / "checkpoints"
    return inside if inside.is_dir() else Path(path)


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    ls = command("ls", _list)
    ls.add_argument("root", help="folder of checkpoints, or of a run")
    verify = command("verify", _verify)
    verify.add_argument("paths", nargs="+", help="checkpoints, or folders of them or of runs")
    show = command("show", _show)
    one = "a checkpoint; of a folder of them or of a run the newest, or FOLDER/best"
    show.add_argument("path", help=one)
    show.add_argument("--stats", action="store_true", help="also minimum, mean and maximum of every tensor")
    compare = command("diff", _diff)
    compare.add_argument("a", help=one)
    compare.add_argument("b", help=one)
    compare.add_argument("--tolerance", type=float, default=0.0, help="largest difference to ignore (default 0)")
    conversion = command("convert", _convert)
    conversion.add_argument("source", help=one)
    conversion.add_argument("target", help="FILE.safetensors for the weights only, or a folder for a checkpoint")
    conversion.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="cast floating tensors")
    conversion.add_argument("--drop", action="append", default=[], metavar="GROUP", help="leave out, e.g. optimizer")
    conversion.add_argument("--shard-mb", type=float, metavar="MB", help="size of a shard (default 64; inf: one file)")
    pruning = command("prune", _prune)
    pruning.add_argument("root", help="folder of checkpoints, or of a run")
    pruning.add_argument("--max-to-keep", type=int, required=True, help="newest checkpoints that stay")
    pruning.add_argument("--protect", action="append", default=[], metavar="NAME", help="a checkpoint that stays")
    pruning.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    return parser
