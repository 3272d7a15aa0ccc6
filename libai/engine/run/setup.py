"""What a process does before it builds a run: the config is checked; the output folder, the logs and limits are set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from libai.config import RunConfig, validate
from libai.engine.run.run_folder import prepare_output_dir
from libai.utils.distributed import barrier, broadcast_object, get_rank, get_world_size, is_main_process
from libai.utils.logging import setup_logging
from libai.utils.rank_notes import note_output_folder
from libai.utils.seeding import raise_open_file_limit


def default_setup(
    cfg: Any, overrides: Sequence[str] | None = None, *, trains: bool = True, quiet: bool = False
) -> RunConfig:
    """Check the config and prepare the process: output folder, logs, limits. Every rank must call it.

    `overrides`: what was typed on the command line, for `overrides.txt`. `trains=False` (`--dry-run`, `--eval-only`)
    leaves the output folder alone; else it is made, and refused when another job trains there. What it holds stays
    until training begins. `quiet`: see `setup_logging`. Returns the frozen `RunConfig`. Raises `UserError` before
    anything is written.
    """
    config = cfg if isinstance(cfg, RunConfig) else validate(cfg, world_size=get_world_size())
    # of rank 0: processes that another launcher has started may each have their own `${now:...}`
    train = replace(config.train, output_dir=broadcast_object(config.train.output_dir))
    config = replace(config, train=train, overrides=tuple(overrides or ()))
    output_dir = Path(train.output_dir)
    if trains and is_main_process():
        prepare_output_dir(output_dir)
    barrier()
    if trains:
        note_output_folder(output_dir)
    raise_open_file_limit()  # loaders, sockets of many ranks and shards together pass the usual 1024
    setup_logging(output_dir if trains else None, get_rank(), get_world_size(), holds_files=True, quiet=quiet)
    return config
