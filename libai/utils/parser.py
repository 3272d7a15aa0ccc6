"""Argument parser of all commands and of the training program."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from typing import Any, NoReturn

from libai.utils.errors import UserError


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wrap the paragraphs of a description, except those with indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        filled = []
        for part in paragraphs:
            keeps_lines = "\n " in part or part.startswith(" ")
            filled.append(
                part if keeps_lines else textwrap.fill(part, width, break_on_hyphens=False)
            )
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations.

    Mistakes raise `UserError` with the nearest flag.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": _Help, "allow_abbrev": False, **options})

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument as argparse does.

        An optional positional argument is not reported as required.
        """
        if options.get("nargs") == "*" and not names[0].startswith("-"):
            options.setdefault("default", [])
        return super().add_argument(*names, **options)

    @property
    def flags(self) -> list[str]:
        """Long flags that are shown in the help."""
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [
            flag for action in actions for flag in action.option_strings if flag.startswith("--")
        ]

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with the message, and with the nearest flag if a flag is unknown."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        word = words.split()[0] if words.split() else ""
        if is_unknown and word.startswith("-"):
            near = difflib.get_close_matches(word.partition("=")[0], self.flags, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The flags are {', '.join(self.flags)}."
            message = f"{word}: unknown flag. {hint}"
        message = message.replace("ignored explicit argument", "takes no value, found")
        stop = "" if message.endswith((".", "?")) else "."
        raise UserError(f"{message}{stop} `{self.prog} --help` lists the arguments.")
