"""The command `libai SUBCOMMAND …`, or `python -m libai`, and its table of subcommands.

To add a subcommand, write a file named after it in libai/cli/commands with `run(arguments) -> exit
code`, and add a line to `GROUPS`. A module is imported only when its subcommand runs, which keeps
`libai --help` as fast as Python's start.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from libai import __version__
from libai.launch.guard import TRACEBACK_FLAG, guarded_main
from libai.utils.errors import UserError

#: title in `libai --help` -> subcommand -> what it does
GROUPS = {
    "Train": {
        "train": "train a model from a config file",
        "resume": "continue a run from its newest checkpoint",
        "eval": "evaluate a run, or a config with given weights",
    },
    "Look": {
        "compare": "compare settings, metrics and curves of runs",
        "doctor": "check that training works on this machine",
    },
    "Models and files": {
        "predict": "predict for samples in a file or a dataset",
        "generate": "continue text with a language model",
        "checkpoint": "list, verify, compare, convert checkpoints",
        "hf": "import, export, verify Hugging Face weights",
        "preprocess": "turn text into token files for training",
    },
    "Prove and measure": {
        "parity": "prove that eager and graph mode train the same",
        "verify-resume": "prove that a config resumes exactly",
        "benchmark": "measure training speed in both modes",
    },
}
COMMANDS = [name for group in GROUPS.values() for name in group]
#: subcommand in libai/cli/training.py -> its function
_TRAINING = {"train": "train", "resume": "resume", "eval": "evaluate"}


def module_of(name: str) -> ModuleType:
    """Import and return the module of a subcommand."""
    file = "training" if name in _TRAINING else f"commands.{name.replace('-', '_')}"
    return importlib.import_module(f"libai.cli.{file}")


def usage() -> str:
    """Return the text of `libai --help`."""
    lines = ["usage: libai COMMAND [arguments]", ""]
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<14} {summary}" for name, summary in commands.items()]
        lines.append("")
    return "\n".join(
        [*lines, "First run: libai train mlp_digits", "Flags of a command: libai COMMAND --help"]
    )


def dispatch(words: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"libai {__version__}")
        return 0
    name, *arguments = words
    if name not in COMMANDS:
        # imported here because a correct command line does not need it
        from libai.config.settings.errors import did_you_mean

        hint = did_you_mean(name, COMMANDS) or f" The commands are {', '.join(COMMANDS)}."
        raise UserError(f"{name}: unknown command.{hint}")
    sys.argv = [
        f"libai {name}",
        *arguments,
    ]  # for usage messages and for the command that a run records
    if name != "train":  # `train` handles the flag itself and lists it in its help
        arguments = [word for word in arguments if word != TRACEBACK_FLAG]
    return getattr(module_of(name), _TRAINING.get(name, "run"))(arguments)


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    guarded_main(lambda: until_nobody_reads(lambda: dispatch(sys.argv[1:])))


def until_nobody_reads(action: Callable[[], Any]) -> Any:
    """Run `action`, which prints, and return its result, or None if the reader closes the pipe, as
    `… | head` does.
    """
    try:
        code = action()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output flushed at exit must not fail again
