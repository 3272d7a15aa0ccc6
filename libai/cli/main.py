"""The command `libai SUBCOMMAND …`, or `python -m libai`, and its table of subcommands.

To add a subcommand, write a file in libai/cli/commands with `run(arguments) -> exit code` and add a line to `GROUPS`.
A module is imported only when its subcommand runs, which keeps `libai --help` as fast as Python's own start.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, NoReturn

from libai import __version__
from libai.launch.guard import TRACEBACK_FLAG, guarded_main
from libai.utils.errors import UserError


class Command(NamedTuple):
    """A subcommand. The arguments after its name are passed to `function` of `module`."""

    summary: str
    module: str
    function: str = "run"

    def load(self) -> ModuleType:
        """Import and return the module."""
        return importlib.import_module(self.module)


GROUPS: dict[str, dict[str, Command]] = {
    "Train": {
        "train": Command("train a model from a config file", "libai.cli.training", "train"),
        "resume": Command("continue a run from its newest checkpoint", "libai.cli.training", "resume"),
        "eval": Command("evaluate a run, or a config with given weights", "libai.cli.training", "evaluate"),
    },
    "Look": {
        "compare": Command("compare settings, metrics and curves of runs", "libai.cli.commands.compare"),
        "doctor": Command("check that training works on this machine", "libai.cli.commands.doctor"),
    },
    "Models and files": {
        "predict": Command("predict for samples in a file or a dataset", "libai.cli.commands.predict"),
        "generate": Command("continue text with a language model", "libai.cli.commands.generate"),
        "checkpoint": Command("list, verify, compare, convert checkpoints", "libai.cli.commands.checkpoint"),
        "hf": Command("import, export, verify Hugging Face weights", "libai.cli.commands.hf"),
        "preprocess": Command("turn text into token files for training", "libai.cli.commands.preprocess"),
    },
    "Prove and measure": {
        "parity": Command("prove that eager and graph mode train the same", "libai.cli.commands.parity"),
        "verify-resume": Command("prove that a config resumes exactly", "libai.cli.commands.verify_resume"),
        "benchmark": Command("measure training speed in both modes", "libai.cli.commands.benchmark"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def usage() -> str:
    """Return the text of `libai --help`."""
    lines = ["usage: libai COMMAND [arguments]", ""]
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<14} {command.summary}" for name, command in commands.items()]
        lines.append("")
    return "\n".join([*lines, "First run: libai train mlp_digits", "Flags of a command: libai COMMAND --help"])


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
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(COMMANDS)}."
        raise UserError(f"{name}: unknown command. {hint}")
    command = COMMANDS[name]
    sys.argv = [f"libai {name}", *arguments]  # for usage messages and for the command that a run records
    if name != "train":  # `train` handles the flag itself and lists it in its help
        arguments = [word for word in arguments if word != TRACEBACK_FLAG]
    return getattr(command.load(), command.function)(arguments)


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    guarded_main(lambda: _until_nobody_reads(sys.argv[1:]))


def _until_nobody_reads(words: Sequence[str]) -> int:
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as `… | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output flushed at exit must not fail again
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename}: {error.strerror}. Choose a file or folder that you can access.") from None
