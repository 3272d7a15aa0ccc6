"""Time every operation of a config's eager update on CPU: `python tools/profile_ops.py CONFIG [overrides] [flags]`.

Prints, longest first, calls, microseconds per call and share of each operation in the forward pass, the backward pass
and the update, and how much longer they take one by one than in a real update. One process; nothing is written.
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
from libai.utils.seeding import resolve_seed, seed_everything


def main() -> int:
    args = _parser().parse_intermixed_args()
    if get_world_size() > 1:
        raise UserError(
            f"tools/profile_ops.py times one process, and this job has {get_world_size()}, which would wait for each "
            "other inside the operations. Start it with python instead of the launcher."
        )
    for name, value in (("--updates", args.updates), ("--lines", args.lines)):
        if value < 1:
            raise UserError(f"{name}={value}: at least 1 is needed. Leave it out for the default.")
    # with --json, standard output holds the JSON and nothing else, whatever a model prints
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        profile = profile_config(args.config, args.overrides, args.updates, args.shapes)
    print(profile.to_json() if args.json else profile.table(args.lines))
    return 0


def profile_config(config: str, overrides: list[str], num_updates: int, with_shapes: bool) -> Any:
    """The `OpProfile` of a config: its parts, built as a run builds them, in eager mode."""
    run: Any = validate(LazyConfig.apply_overrides(LazyConfig.load(config), overrides))

    from libai.engine import BatchPlan, build
    from libai.engine.op_profile import profile_ops
    from libai.engine.support import check_supported
    from libai.parallel import Mesh

    if run.mode == "graph":
        raise UserError(
            "graph.enabled=true: the operations of a compiled step have no times of their own in OneFlow 0.9. Profile "
            "the same training with graph.enabled=false."
        )
    device = default_device(run.train.device)
    if device != "cpu":
        raise UserError(
            f"train.device={device}: on a GPU the host's clock sees launches and not kernels. Set train.device=cpu, "
            "or use train.profiler.enabled=true in a run, which has OneFlow's own profiler on CUDA."
        )
    check_supported(run, "eager", device)
    seed = seed_everything(resolve_seed(run.train.seed))
    train = run.train
    sizes = solve_batch_sizes(train.train_micro_batch_size, train.global_batch_size, train.num_accumulation_steps, 1)
    mesh = Mesh(device=device)
    loader = build.build_train_loader(run, mesh, sizes.micro, seed)
    plan = BatchPlan.make(
        sizes,
        1,
        train_iter=train.train_iter,
        train_epoch=train.train_epoch,
        warmup_ratio=train.warmup_ratio,
        samples_per_epoch=getattr(loader, "samples_per_epoch", None),
    )
    model = build.build_model(run)
    optimizer = build.build_optimizer(run, model)
    schedule = build.build_lr_scheduler(run, optimizer, plan)
    trainer = build.build_trainer(run, "eager", model, [], optimizer, schedule, plan, mesh, seed)
    batches = itertools.cycle(loader)  # a loader of the user's own may end
    return profile_ops(
        trainer, lambda: list(itertools.islice(batches, sizes.accumulation)), num_updates, with_shapes=with_shapes
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profile_ops.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for tools/train_net.py")
    parser.add_argument("--updates", type=int, default=10, metavar="N", help="timed updates (default 10)")
    parser.add_argument("--lines", type=int, default=30, metavar="N", help="operations in the table (default 30)")
    parser.add_argument("--shapes", action="store_true", help="tell calls of one operation apart by their shapes")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser


if __name__ == "__main__":
    guarded_main(main)
