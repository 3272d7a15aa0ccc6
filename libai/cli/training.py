"""Implement `libai train`, `libai eval` and `libai resume`, which run the training program on this
machine.
"""

from __future__ import annotations

import inspect
import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.cli import launch
from libai.launch import external
from libai.launch.command_line import (
    EVAL_FLAGS,
    FLAGS,
    LAUNCHER_FLAGS,
    build_parser,
    take_first_path,
    take_flag,
)
from libai.launch.job import TRAINING
from libai.utils.atomic import config_of_run, read_json
from libai.utils.errors import UserError
from libai.utils.installation import docs_page, shipped_configs

_WORDS = "CONFIG [-n PROCS] [key=value | +key=value | ~key] [flags]"


def train(arguments: Sequence[str]) -> int:
    """Train a config, given as a file or as the name of a shipped config."""
    missing = "no config given. `libai train --help` lists the shipped ones."
    config, processes, words = _parse(arguments, f"train {_WORDS}", train.__doc__, missing)
    return start(config, processes, words)


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate once: a checkpoint in a run's folder (--checkpoint best|last|NAME|PATH), or the
    weights in train.load_weight=CHECKPOINT; on the data of the config, or on --input FILE.
    """
    missing = "no run or config is given. Give the output folder of a run, or a config."
    name, processes, words = _parse(arguments, f"eval RUN|{_WORDS}", evaluate.__doc__, missing)
    choice, words = take_flag("--checkpoint", words)
    file, words = take_flag("--input", words)
    words.append("--eval-only")
    if file is not None:
        words.append(f"dataloader.test={{file: {json.dumps(_loader_of(file))}}}")
    if Path(name).is_dir():
        return _continue(Path(name), processes, words, choice)
    if choice is not None:
        raise UserError(
            f"--checkpoint {choice} chooses a checkpoint of a run, and {name} is not the folder of "
            "one. Give the folder, or train.load_weight=CHECKPOINT."
        )
    return start(name, processes, words)


def resume(arguments: Sequence[str]) -> int:
    """Continue a run from the newest checkpoint in its folder, by default on the same number of
    processes.
    """
    missing = "no run is given. Give its output folder, such as out/mlp_digits."
    name, processes, words = _parse(
        arguments, f"resume RUN {_WORDS.partition(' ')[2]}", resume.__doc__, missing
    )
    return _continue(Path(name), processes, words)


def _loader_of(file: str) -> dict[str, Any]:
    """Return the section of a loader for the rows of a file, which the run's dataset encodes."""
    encoded = {
        "_target_": "libai.data.encode_file",
        "path": os.path.abspath(file),
        "dataset": "${dataloader.train.dataset}",
    }
    return {"_target_": "libai.data.build_eval_loader", "dataset": encoded}


def _continue(
    folder: Path, processes: str | None, words: Sequence[str], choice: str | None = None
) -> int:
    """Start the run in `folder` again from its newest checkpoint, or evaluate that or `choice`."""
    config = config_of_run(folder)
    # an evaluation of given weights does not need the run's checkpoint
    has_weights = "--eval-only" in words and any(
        word.startswith("train.load_weight") for word in words
    )
    # the flag is not last, because it would take a mistaken word after the run as the path of a
    # checkpoint
    # imported here because it imports omegaconf
    from libai.config.overrides import format_override

    own_folder = format_override("train.output_dir", str(folder))
    if has_weights:
        resumed = []
    elif "--eval-only" in words:
        from libai.checkpoint import resolve_in

        resumed = ["--resume", str(resolve_in(folder, choice))]
    else:
        resumed = ["--resume"]
    words = [*resumed, own_folder, *words]
    return start(str(config), processes, words, default_processes=_processes_of(folder))


def start(
    config: str, processes: str | None, words: Sequence[str], default_processes: str = "1"
) -> int:
    """Start processes on this machine and train, or train in this process if another launcher has
    started it.
    """
    place = external.find_place(os.environ)
    if place is None:
        return launch.run([TRAINING, config, processes or default_processes, *words])
    if place.is_machine:
        os.environ.update(external.machine_variables(place, os.environ))
        return launch.run([TRAINING, config, processes or "1", *words])
    if processes is not None:
        raise UserError(
            f"-n {processes}, but {place.launcher} has already started several processes on this "
            f"machine. Remove -n, or let {place.launcher} start one process per machine."
        )
    return launch.be_rank(place, config, words)


def _processes_of(folder: Path) -> str:
    layout = read_json(folder / "env.json").get("layout")
    return str(layout.get("world_size", 1)) if isinstance(layout, dict) else "1"


def _parse(
    arguments: Sequence[str], usage: str, description: str | None, missing: str
) -> tuple[str, str | None, list[str]]:
    """Return the config or run, the value of `-n` or None, and the other arguments unchanged.

    The config or run is the first argument that is neither a setting nor a flag. Raises `UserError`
    with the message `missing` if there is none.
    """
    if {"-h", "--help"} & set(arguments):
        names = sorted(path.stem for path in Path(shipped_configs()).glob("*.py"))
        shipped = (
            f"Shipped configs: {', '.join(names)}. {docs_page('config.md')} explains the settings."
        )
        # `Parser` keeps the lines of a description
        description = f"{inspect.cleandoc(description or '')}\n\n{textwrap.fill(shipped, 79)}"
        flags = {**LAUNCHER_FLAGS, **(EVAL_FLAGS if usage.startswith("eval") else {}), **FLAGS}
        build_parser(flags, usage=f"libai {usage}", description=description).parse_args(["--help"])
    processes, words = take_flag("--procs", arguments)
    name = take_first_path(words)
    if name is None:
        raise UserError(missing)
    return name, processes, words
