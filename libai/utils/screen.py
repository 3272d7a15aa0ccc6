"""Format text for a terminal: coloured levels and tables. Uses only the standard library."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from typing import TextIO

from libai.utils.errors import describe_error

#: removes an unfinished line, such as a progress bar, from a terminal
CLEAR = "\r\x1b[K"
_COLOURS = {"warning": 33, "error": 31, "critical": 31}


def is_terminal(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal that a person reads.

    `!command` in a notebook has a terminal too, but the notebook stores its output, so it does not
    count.
    """
    return stream.isatty() and "JPY_PARENT_PID" not in os.environ


def coloured(level: str, stream: TextIO) -> str:
    """Return `level` in its colour ("warning" yellow, "error" red), or plain without a terminal or
    with NO_COLOR.
    """
    shows = (
        is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    return f"\x1b[{_COLOURS[level]}m{level}\x1b[0m" if shows and level in _COLOURS else level


def say(text: str, end: str = "\n") -> None:
    """Write a message to stderr and colour a leading level.

    On a terminal, the message replaces an unfinished line.
    """
    level, colon, rest = text.partition(": ")
    if colon and level in _COLOURS:
        text = f"{coloured(level, sys.stderr)}: {rest}"
    clear = CLEAR if is_terminal(sys.stderr) else ""
    with contextlib.suppress(OSError):  # a job continues if stderr is full or nobody reads it
        print(f"{clear}{text}", end=end, file=sys.stderr, flush=True)


def say_error(text: str, exit_code: int) -> None:
    """Write an error to stderr, or as JSON to stdout if the command has --json."""
    if "--json" in sys.argv:
        print(
            json.dumps(describe_error(text.removeprefix("error: "), exit_code), indent=1),
            flush=True,
        )
    else:
        say(text)


def format_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Format rows as columns of text, each as wide as its longest cell.

    `right` lists the right-aligned columns.

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
