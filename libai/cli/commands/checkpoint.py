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
from collections.abc import Sequence
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


def _list(args: argparse.Namespace) -> int:
    """One line per checkpoint: iteration, size, state of health, best or not."""
    root = _existing(args.root)
    try:
        best = checkpoint.read_best(root)
    except checkpoint.CheckpointError as error:  # it only hints; the list is still worth having
        best = None
        print(f"warning: {error}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for path in checkpoint.list_checkpoints(root):
        problems = checkpoint.verify(path, deep=args.deep)
        rows.append(
            {
                "name": path.name,
                "iteration": checkpoint.iteration_of(path.name),
                "bytes": sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
                "problems": problems,
                "best": {best.metric: best.value} if best and best.path == path else None,
            }
        )
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            health = "damaged: " + "; ".join(row["problems"]) if row["problems"] else "ok"
            is_best = "".join(f"  best {metric}={value:g}" for metric, value in (row["best"] or {}).items())
            print(f"{row['name']}  {format_bytes(row['bytes']):>9}  {health}{is_best}")
        if not rows:
            print(f"no checkpoints in {root}")
    return 1 if any(row["problems"] for row in rows) else 0


def _verify(args: argparse.Namespace) -> int:
    """Read every byte and say what is wrong."""
    results = {}
    for given in args.paths:
        path = _existing(given)
        is_one = checkpoint.iteration_of(path.name) is not None or not checkpoint.list_checkpoints(path)
        for found in [path] if is_one else checkpoint.list_checkpoints(path):
            results[str(found)] = checkpoint.verify(found, deep=not args.shallow)
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        for name, problems in results.items():
            print(f"{name}: {'ok' if not problems else 'damaged'}")
            for problem in problems:
                print(f"  {problem}")
    return 1 if any(results.values()) else 0


def _show(args: argparse.Namespace) -> int:
    """Iteration, state and every tensor's dtype, shape and size; `--stats` reads the data too."""
    loaded = checkpoint.load(checkpoint.resolve(_of_run(args.path)))
    groups = {
        name: {tensor: _describe(group, tensor, args.stats) for tensor in group}
        for name, group in loaded.tensors.items()
    }
    if args.json:
        for facts in [facts for group in groups.values() for facts in group.values()]:
            for key in ("min", "mean", "max"):
                if not np.isfinite(facts.get(key, 0.0)):
                    facts[key] = None  # JSON has no number for it
        shown = {"path": str(loaded.path), "iteration": loaded.iteration, "state": loaded.state, "tensors": groups}
        print(json.dumps(shown, indent=1))
        return 0
    print(f"{loaded.path}  iteration {loaded.iteration}")
    for name, tensors in groups.items():
        total = sum(tensor["bytes"] for tensor in tensors.values())
        count = sum(int(np.prod(tensor["shape"])) for tensor in tensors.values())
        print(f"{name}: {len(tensors)} tensors, {count:,} values, {format_bytes(total)}")
        for tensor, facts in tensors.items():
            stats = "".join(f"  {key} {facts[key]:.6g}" for key in ("min", "mean", "max") if key in facts)
            print(f"  {tensor}  {facts['dtype']} {tuple(facts['shape'])}{stats}")
    print("state:")
    print(json.dumps(_shortened(loaded.state), indent=1, sort_keys=True))
    return 0


def _shortened(state: Any) -> Any:
    """`state` with the beginning of long texts alone: generators are saved as such."""
    if isinstance(state, dict):
        return {key: _shortened(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_shortened(value) for value in state]
    is_long = isinstance(state, str) and len(state) > 100
    return f"{state[:20]}… ({len(state)} characters)" if is_long else state


def _describe(group: checkpoint.TensorGroup, name: str, with_stats: bool) -> dict[str, Any]:
    spec = group.spec(name)
    facts: dict[str, Any] = {"dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.num_bytes}
    if with_stats and spec.num_bytes:
        array = group[name].astype(np.float64)
        facts |= {"min": float(array.min()), "mean": float(array.mean()), "max": float(array.max())}
    return facts


def _diff(args: argparse.Namespace) -> int:
    """Return how two checkpoints differ: tensors by largest difference, state by key."""
    differences = checkpoint.diff(
        checkpoint.load(checkpoint.resolve(_of_run(args.a))),
        checkpoint.load(checkpoint.resolve(_of_run(args.b))),
        args.tolerance,
    )
    if args.json:
        print(json.dumps(differences, indent=1))
    else:
        print("\n".join(f"{where}: {what}" for where, what in differences.items()) or "equal")
    return 1 if differences else 0


def _convert(args: argparse.Namespace) -> int:
    """Write a copy: one safetensors file of the weights, or a checkpoint in another folder."""
    source = checkpoint.load(checkpoint.resolve(_of_run(args.source)))
    asked = args.merge or args.shard_mb is not None
    if asked and args.target.endswith(".safetensors"):
        raise UserError(f"{args.target} is one file, for which --merge and --shard-mb do nothing. Leave them out.")
    if args.shard_mb is not None and args.shard_mb <= 0:
        raise UserError(f"--shard-mb {args.shard_mb:g}: it must be greater than 0.")
    shard_bytes = 2**62 if args.merge else int((args.shard_mb or 64) * 1e6)
    written = checkpoint.convert(source, args.target, dtype=args.dtype, drop=args.drop, shard_bytes=shard_bytes)
    print(json.dumps({"written": str(written)}) if args.json else f"wrote {written}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    """Delete old checkpoints; never the best, the protected ones or the newest that verifies."""
    deleted = checkpoint.prune(_existing(args.root), args.max_to_keep, args.protect, is_dry_run=args.dry_run)
    if args.json:
        print(json.dumps({"deleted": [str(path) for path in deleted], "dry_run": args.dry_run}))
    else:
        for path in deleted:
            print(f"{'would delete' if args.dry_run else 'deleted'} {path}")
    return 0


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
    ls.add_argument("--deep", action="store_true", help="compare the digests of all data, as verify does")
    verify = command("verify", _verify)
    verify.add_argument("paths", nargs="+", help="checkpoints, or folders of them or of runs")
    verify.add_argument("--shallow", action="store_true", help="manifest, state, headers and sizes only")
    show = command("show", _show)
    show.add_argument(
        "path", help="a checkpoint, a folder of them or of a run (the newest), FOLDER/best or FOLDER/last"
    )
    show.add_argument("--stats", action="store_true", help="also minimum, mean and maximum of every tensor")
    compare = command("diff", _diff)
    compare.add_argument("a")
    compare.add_argument("b")
    compare.add_argument(
        "--tolerance", type=float, default=0.0, help="ignore absolute differences up to this (default 0)"
    )
    conversion = command("convert", _convert)
    conversion.add_argument("source", help="a checkpoint")
    conversion.add_argument("target", help="FILE.safetensors for the weights only, or a folder for a checkpoint")
    conversion.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="cast floating tensors")
    conversion.add_argument("--drop", action="append", default=[], metavar="GROUP", help="leave out, e.g. optimizer")
    shards = conversion.add_mutually_exclusive_group()
    shards.add_argument("--merge", action="store_true", help="one file per group")
    shards.add_argument("--shard-mb", type=float, metavar="MB", help="size of a shard (default 64)")
    pruning = command("prune", _prune)
    pruning.add_argument("root", help="folder of checkpoints, or of a run")
    pruning.add_argument("--max-to-keep", type=int, required=True, help="newest checkpoints that stay")
    pruning.add_argument("--protect", action="append", default=[], metavar="NAME", help="a checkpoint that stays")
    pruning.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser
