"""Tables of text for the console."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
