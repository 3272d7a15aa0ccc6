"""Text for a terminal: folded at word boundaries, levels in colour. What is no terminal gets every line as it is.

Standard library only.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

_COLOURS = {"warning": 33, "error": 31, "critical": 31}
#: a first column and the space behind it, a bullet, or the indentation
_FIRST_COLUMN = re.compile(r"\s*(?:[-*] |\S+(?: \S+){0,3}?  +)?")


def is_terminal(stream: TextIO) -> bool:
    """Whether a person reads `stream` on a terminal. `!command` in a notebook has one, whose output the page keeps."""
    return stream.isatty() and "JPY_PARENT_PID" not in os.environ


def columns(stream: TextIO) -> int | None:
    """The width of the terminal behind `stream`; None where there is none."""
    try:
        if not is_terminal(stream):
            return None
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError, AttributeError):
        return None


def fold(text: str, width: int | None) -> str:
    """`text` with no line longer than `width`: what is too long continues below the second column, or indented.

    A word that is longer, such as a path, stays whole; so does everything with `width=None`.

    >>> print(fold("seed   1\\nbatch  32 samples, of 4 ranks", 20))
    seed   1
    batch  32 samples,
           of 4 ranks
    """
    if not width:
        return text
    return "\n".join(_fold_line(line, width) if len(line) > width else line for line in text.split("\n"))


def _fold_line(line: str, width: int) -> str:
    found = _FIRST_COLUMN.match(line)
    first = found.group() if found else ""
    indent = len(first) if first.strip() and len(first) <= width * 2 // 3 else len(line) - len(line.lstrip()) + 2
    if line.count("  ", len(first)) > 1:  # `name value  name value`: a name stays with its value
        line = re.sub(r"(?<=[^ ,;]) (?=[^ ])", "\xa0", line)
    wrapped = textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return wrapped.replace("\xa0", " ")


def coloured(level: str, stream: TextIO) -> str:
    """`level` in its colour ("warning" yellow, "error" red), plain without a terminal or with NO_COLOR."""
    shows = columns(stream) is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_COLOURS[level]}m{level}\x1b[0m" if shows and level in _COLOURS else level


def say(text: str) -> None:
    """Write a message to stderr: folded, unless it is a traceback, with a level in front in its colour."""
    level, colon, rest = text.partition(": ")
    folded = text if "Traceback (most recent" in text else fold(text, columns(sys.stderr))
    if colon and level in _COLOURS:
        folded = coloured(level, sys.stderr) + folded.removeprefix(level)
    print(folded, file=sys.stderr, flush=True)
