"""Prove that a config trains the same in eager and in graph mode: `python tools/parity.py CONFIG [overrides] [flags]`.

Runs the config's own model, data, optimizer and schedule in both modes from one seed and reports the modes' own noise,
the largest differences, and the module that diverges first. One process. Nothing is written to the output folder.

Exit codes: 0 the same training (or within the bound, which the report says); 1 broken; 2 a mistake in config or
arguments. docs/parity.md explains the report.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without installation

from libai.config import LazyConfig, validate
from libai.config.batch import solve_batch_sizes
from libai.runtime import guarded_main
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError
from libai.utils.seeding import resolve_seed


def main() -> int:
    args = _parser().parse_intermixed_args()
    if get_world_size() > 1:
        raise UserError(
            f"tools/parity.py runs on one process, and this job has {get_world_size()}. Start it with python instead "
            "of the launcher."
        )
    # with --json, standard output holds the JSON and nothing else, whatever a model prints
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        report = check_config(args.config, args.overrides, args.iters, args.bound)
    print(report.to_json() if args.json else report)
    return report.exit_code


def check_config(config: str, overrides: list[str], num_iters: int, bound: float) -> Any:
    """The `ParityReport` of a config: its parts, built as a run builds them, in both modes."""
    # how a graph is debugged and what follows when it cannot be built are no part of the training
    overrides = [*overrides, "graph.debug=-1", "graph.on_build_error=raise"]
    run: Any = validate(LazyConfig.apply_overrides(LazyConfig.load(config), overrides))

    from libai.engine import BatchPlan, build, check_parity
    from libai.engine.support import amp_dtype, check_supported
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

    return check_parity(
        lambda: build.build_model(run),
        itertools.islice(loader, num_iters * sizes.accumulation),
        build_optimizer,
        num_iters=num_iters,
        bound=bound,
        build_lr_scheduler=lambda optimizer: build.build_lr_scheduler(run, optimizer, plan),
        num_accumulation_steps=sizes.accumulation,
        max_grad_norm=run.train.clip_grad.max_norm,
        norm_type=run.train.clip_grad.norm_type,
        amp=amp,
        seed=seed,
        device=device,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parity.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", metavar="CONFIG", help="a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for tools/train_net.py")
    parser.add_argument("--iters", type=int, default=10, metavar="N", help="updates of each run (default 10)")
    parser.add_argument(
        "--bound", type=float, default=1e-5, metavar="X", help="largest relative difference of a loss (default 1e-5)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


if __name__ == "__main__":
    guarded_main(main)
