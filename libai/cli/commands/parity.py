"""Prove that a config trains the same in eager and in graph mode.

Runs the config's own model, data, optimizer and schedule in both modes from one seed and reports the modes' own noise,
the largest differences, and the module that diverges first. With --procs and --mesh it compares both modes, on one
process and on each of these meshes, with eager mode on one process. --bisect looks for what makes the modes differ, and
--minify FILE writes it as a program of bare OneFlow. Nothing is written to the output folder.

Exit codes: 0 the same training (or within the bound, which the report says); 1 broken; 2 a mistake in config or
arguments. docs/parity.md explains the report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.cli.parser import Parser
from libai.config import LazyConfig, solve_batch_sizes, validate
from libai.engine.parity.bisection.journal import Journal, supervise
from libai.engine.parity.bisection.minify import minify, require_writable
from libai.engine.parity.bisection.search import Culprit, find_culprit
from libai.engine.parity.check import check_parity, on_bench
from libai.engine.parity.runs import Bench
from libai.engine.verify.meshes import check_meshes, run_cell
from libai.launch.guard import guarded_main
from libai.launch.installation import LIBAI
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError
from libai.utils.seeding import resolve_seed


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    args = build_parser().parse_intermixed_args(arguments)
    args.bisect = args.bisect or args.minify is not None
    if args.cell:  # a rank of a job that check_meshes has started
        run_cell(args.config_file, [*filter(None, [args.config]), *args.overrides], args.cell)
        return 0
    if args.search:  # a process that _bisect has started
        _search(args)
        return 0
    if args.config is None:
        raise UserError("no config file is named. Start with one: CONFIG [key=value …].")
    if get_world_size() > 1:
        raise UserError(
            f"this command runs on one process, and this job has {get_world_size()}. Start it without a launcher."
        )
    # with --json, standard output holds the JSON and nothing else, whatever a model prints
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        report: Any
        if args.bisect and (args.procs > 1 or args.mesh):
            raise UserError("--bisect and --minify compare the modes on one process. Leave --procs and --mesh out.")
        if args.bisect:
            report = _bisect(args)
        elif args.procs > 1 or args.mesh:
            meshes = args.mesh or [f"data={args.procs}"]
            report = check_meshes(args.config, args.overrides, args.procs, meshes, args.iters, args.bound)
        else:
            report = check_config(args.config, args.overrides, args.iters, args.bound)
    print(report.to_json() if args.json else report)
    return report.exit_code


def _bisect(args: argparse.Namespace) -> Culprit:
    """Search in a process of its own, or in several where a training ends its process."""
    if args.minify is not None:
        require_writable(args.minify)
    given = [args.config, *args.overrides, f"--iters={args.iters}", f"--bound={args.bound}"]
    given += [f"--minify={args.minify}"] if args.minify else []
    command = [*LIBAI, "parity", *given, "--search"]
    return Culprit.of(supervise(command, lambda trial: print(f"parity: {trial} …", file=sys.stderr, flush=True)))


def _search(args: argparse.Namespace) -> None:
    """One process of `_bisect`; the last two arguments are the paths of the journal and of the result."""
    *overrides, journal, result = args.overrides

    def look(bench: Bench, bound: float) -> Culprit:
        found = find_culprit(bench, bound, Journal(Path(journal)))
        return minify(bench, bound, found, args.minify) if args.minify else found

    found = check_config(args.config, overrides, args.iters, args.bound, functools.partial(on_bench, look))
    Path(result).write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")


def check_config(config: str, overrides: list[str], num_iters: int, bound: float, check: Any = check_parity) -> Any:
    """What `check` (`check_parity`, or another with its arguments) says of a config's parts, as a run builds them."""
    # how a graph is debugged and what follows when it cannot be built are no part of the training
    overrides = [*overrides, "graph.debug=-1", "graph.on_build_error=raise"]
    run: Any = validate(LazyConfig.apply_overrides(LazyConfig.load(config), overrides))

    from libai.engine import BatchPlan
    from libai.engine.setup import build
    from libai.engine.setup.support import amp_dtype, check_supported
    from libai.parallel import Mesh

    device = default_device(run.train.device)
    for mode in ("eager", "graph"):
        check_supported(run, mode, device)
    amp = amp_dtype(run, "graph", device)
    if amp != amp_dtype(run, "eager", device):
        raise UserError(
            f"train.amp.dtype={run.train.amp.dtype}: on {device} only graph mode computes in it, so that the modes "
            "cannot be equal. Compare them with train.amp.enabled=false."
        )
    sizes = solve_batch_sizes(
        run.train.train_micro_batch_size, run.train.global_batch_size, run.train.num_accumulation_steps, 1
    )
    seed = resolve_seed(run.train.seed)
    loader = build.build_train_loader(run, Mesh(device=device), sizes.micro, seed)
    plan = BatchPlan.make(
        sizes,
        1,
        train_iter=run.train.train_iter,
        train_epoch=run.train.train_epoch,
        warmup_ratio=run.train.warmup_ratio,
        samples_per_epoch=getattr(loader, "samples_per_epoch", None),
    )

    def build_optimizer(model: Any) -> Any:
        optimizer = build.build_optimizer(run, model)
        build.scale_lr(run, optimizer, plan)
        return optimizer

    return check(
        lambda: build.build_model(run),
        itertools.islice(loader, num_iters * sizes.accumulation),
        build_optimizer,
        num_iters=num_iters,
        bound=bound,
        build_lr_scheduler=lambda optimizer: build.build_lr_scheduler(run, optimizer, plan),
        num_accumulation_steps=sizes.accumulation,
        max_grad_norm=run.train.clip_grad.max_norm,
        norm_type=run.train.clip_grad.norm_type,
        activation_checkpoint=run.train.activation_checkpoint.enabled,
        amp=amp,
        seed=seed,
        device=device,
    )


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a config file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for training")
    parser.add_argument("--iters", type=int, default=10, metavar="N", help="updates of each run (default 10)")
    parser.add_argument(
        "--bound", type=float, default=1e-5, metavar="X", help="largest relative difference of a loss (default 1e-5)"
    )
    parser.add_argument("--procs", type=int, default=1, metavar="N", help="processes of each mesh (default 1)")
    parser.add_argument(
        "--mesh",
        action="append",
        metavar="AXIS=N",
        help="data=2, tensor=2, pipeline=2 or several joined by commas; may be given again (default data=N of --procs)",
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="name the smallest set of passes, compile options and repairs, or the module, that makes the modes differ",
    )
    parser.add_argument(
        "--minify",
        type=Path,
        metavar="FILE",
        help="bisect, and write what differs as one program with bare OneFlow that ends with 1 while it does",
    )
    parser.add_argument("--config-file", help=argparse.SUPPRESS)  # what the launcher passes on
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--search", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
