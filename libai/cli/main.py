"""The command `libai SUBCOMMAND …`, also as `python -m libai`: its table of subcommands.

A new subcommand is a file in libai/cli/commands with `run(arguments) -> exit code`, and a line in `COMMANDS`. Modules
are imported when their subcommand runs, so that `libai --help` takes no longer than Python's own start.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from libai import __version__
from libai.launch.guard import guarded_main
from libai.utils.errors import UserError


@dataclass(frozen=True)
class Command:
    """A subcommand: `function` of `module` receives the words after it."""

    summary: str
    module: str
    function: str = "run"

    def load(self) -> ModuleType:
        """Its module."""
        return importlib.import_module(self.module)


COMMANDS: dict[str, Command] = {
    "train": Command("train a config", "libai.cli.training", "train"),
    "eval": Command("evaluate a run, or a config", "libai.cli.training", "evaluate"),
    "resume": Command("continue a run from its newest checkpoint", "libai.cli.training", "resume"),
    "predict": Command("predict with the model of a run or of Hugging Face", "libai.cli.commands.predict"),
    "generate": Command("continue prompts with a language model", "libai.cli.commands.generate"),
    "parity": Command("prove that eager and graph mode train the same", "libai.cli.commands.parity"),
    "verify-resume": Command("prove that a config resumes exactly", "libai.cli.commands.verify_resume"),
    "benchmark": Command("measure configs in both modes", "libai.cli.commands.benchmark"),
    "checkpoint": Command("list, verify, compare, convert and delete checkpoints", "libai.cli.commands.checkpoint"),
    "preprocess": Command("turn text into token files", "libai.cli.commands.preprocess"),
    "hf": Command("import, export and verify weights of Hugging Face", "libai.cli.commands.hf"),
    "compare": Command("compare settings, metrics and curves of runs", "libai.cli.commands.compare"),
    "doctor": Command("check this environment", "libai.cli.commands.doctor"),
}


def usage() -> str:
    """Return the text of `libai --help`."""
    rows = [f"  {name:<14} {command.summary}" for name, command in COMMANDS.items()]
    lines = ["usage: libai COMMAND [arguments]", "", *rows, "", "`libai COMMAND --help` lists the flags of each."]
    return "\n".join(lines)


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
        raise UserError(f"{name}: no such command. {hint}")
    command = COMMANDS[name]
    sys.argv = [f"libai {name}", *arguments]  # for usages, and what a run notes of its command
    return getattr(command.load(), command.function)(arguments)


def main() -> NoReturn:
    """Run the command line of this process and end it."""
    guarded_main(lambda: _until_nobody_reads(sys.argv[1:]))


def _until_nobody_reads(words: Sequence[str]) -> int:
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `… | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at exit
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename}: {error.strerror}. Name a place that can be read, or written to.") from None
