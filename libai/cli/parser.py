"""The argument parser of all subcommands."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from typing import Any, NoReturn

from libai.utils.errors import UserError
from libai.utils.screen import fold


class _Help(argparse.RawDescriptionHelpFormatter):
    """Fills the paragraphs of a description; what is indented in one keeps its lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            fold(part, width)
            if "\n " in part or part[:1] == " "
            else textwrap.fill(part, width, break_on_hyphens=False)
            for part in paragraphs
        )


class Parser(argparse.ArgumentParser):
    """argparse that takes no abbreviations, and whose mistakes are a `UserError` with the nearest flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, "allow_abbrev": False, **options})

    @property
    def flags(self) -> list[str]:
        """The long flags that the help shows."""
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [flag for action in actions for flag in action.option_strings if flag.startswith("--")]

    @property
    def subcommands(self) -> dict[str, Parser]:
        """The parsers of its own subcommands, by name."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(actions[0].choices) if actions else {}

    def error(self, message: str) -> NoReturn:
        """Raise `UserError`."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        word = words.split()[0] if words.split() else ""
        if is_unknown and word.startswith("-"):
            near = difflib.get_close_matches(word.partition("=")[0], self.flags, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(self.flags)}."
            message = f"{word}: no such flag. {hint}"
        stop = "" if message.endswith((".", "?")) else "."
        raise UserError(f"{message}{stop} `{self.prog} --help` tells more.")
