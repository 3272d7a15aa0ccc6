"""Text for a terminal: levels in colour, and tables. Standard library only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from typing import TextIO

from libai.utils.errors import describe_error

_COLOURS = {"warning": 33, "error": 31, "critical": 31}


def is_terminal(stream: TextIO) -> bool:
    """Return whether a person reads `stream` on a terminal. `!command` in a notebook has one, but keeps its output."""
    return stream.isatty() and "JPY_PARENT_PID" not in os.environ


def coloured(level: str, stream: TextIO) -> str:
    """`level` in its colour ("warning" yellow, "error" red), plain without a terminal or with NO_COLOR."""
    shows = is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_COLOURS[level]}m{level}\x1b[0m" if shows and level in _COLOURS else level


def say(text: str) -> None:
    """Write a message to stderr, with a level in front in its colour; on a terminal in place of a bar."""
    level, colon, rest = text.partition(": ")
    if colon and level in _COLOURS:
        text = f"{coloured(level, sys.stderr)}: {rest}"
    clear = "\r\x1b[K" if is_terminal(sys.stderr) else ""
    print(f"{clear}{text}", file=sys.stderr, flush=True)


def say_error(text: str, exit_code: int) -> None:
    """Write an error to stderr or, if --json is among the words of the command, as JSON to stdout."""
    if "--json" in sys.argv:
        print(json.dumps(describe_error(text.removeprefix("error: "), exit_code), indent=1), flush=True)
    else:
        say(text)


def format_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return columns of text, each as wide as its longest cell. `right`: columns whose cells end in line.

    >>> print(format_table([["name", "size"], ["weight", "12"]], right=[1]))
    name    size
    weight    12
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths)):
            cells.append(cell.rjust(width) if number in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
