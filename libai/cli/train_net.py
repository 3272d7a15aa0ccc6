"""The training program that every rank runs.

It reads the arguments, checks the config, builds the run and trains.

It is started by `libai train` and by `bash tools/train.sh tools/train_net.py CONFIG PROCS
[overrides] [flags]`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from libai.cli.main import until_nobody_reads
from libai.config import load_config, parse_args
from libai.config.lazy_config import to_yaml
from libai.launch.guard import guarded_main
from libai.launch.rank import keep_output
from libai.utils.distributed import barrier, get_world_size, is_main_process, prepare_device
from libai.utils.errors import EXIT_FAILED
from libai.utils.logging import engine_logger
from libai.utils.rank_notes import OUTPUT_DIR, own_folder, world_size
from libai.utils.screen import say

if TYPE_CHECKING:  # it imports oneflow
    from libai.engine import Run

#: overrides of --fast-dev-run, which runs a few iterations of everything
FAST_DEV_RUN = [
    "train.train_iter=8",
    "train.train_epoch=0",
    "train.log_period=1",
    "train.evaluation.eval_period=4",
    "train.evaluation.eval_iter=2",
    "train.checkpointer.period=4",
]


def main(run_class: type[Run] | None = None) -> int:
    """Run the command line with `run_class`, a subclass of `libai.engine.Run` (default: `Run`)."""
    args = parse_args(sys.argv[1:], prog="libai train")
    notes = own_folder()
    if notes is None and world_size() == 1 and not (args.quiet or args.print_config):
        say(f"libai: starting {args.config} in this process")
    overrides = [*args.overrides, *(FAST_DEV_RUN if args.fast_dev_run else [])]
    config = load_config(args.config, overrides, get_world_size(), trust=args.trust)
    if args.print_config:
        if is_main_process():
            until_nobody_reads(lambda: print(to_yaml(config.to_config())))
        return 0

    prepare_device(config.train.device, is_eager=config.mode == "eager")
    from libai.engine import Run, default_setup

    trains = not (args.dry_run or args.eval_only or args.find_lr)
    config = default_setup(config, args.overrides, trains=trains, quiet=args.quiet)
    if args.eval_only and args.json:  # the result is the only output
        engine_logger.setLevel(logging.ERROR)
    output_dir = os.path.abspath(config.train.output_dir)
    if notes is not None and trains and is_main_process():
        Path(notes, OUTPUT_DIR).write_text(output_dir, encoding="utf-8")
    if trains:
        keep_output(Path(output_dir))
    run = (run_class or Run)(config, resume=args.resume or config.train.resume, reset=args.reset)
    if args.dry_run:
        run.dry_run()
    elif args.find_lr:
        from libai.engine.run.trials import find_lr_of_run

        find_lr_of_run(run, str(args.find_lr))
    elif args.eval_only:
        metrics = run.report_evaluation()
        if args.json and is_main_process():
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
            print(json.dumps(finite))
    else:
        if run.train().status == "failed":
            return EXIT_FAILED
        # oneflow aborts a rank that is still working after another has left, also on other machines
        barrier()
    return 0


if __name__ == "__main__":
    guarded_main(main)
