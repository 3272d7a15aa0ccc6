"""Choose few rows of a table of test cases so that every pair of values of two columns is tested.

`daily_rows` chooses what each run of the suite tests; the nightly suite tests the whole table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple)


def daily_rows(rows: Sequence[Row], together: int = 2) -> list[Row]:
    """Return rows that contain every combination of `together` values that any row contains.

    Greedy: the next row has the most combinations that are still missing and, among equals, the
    values that were chosen least. The result depends only on the rows.

    >>> daily_rows([("a", 0, "x"), ("a", 1, "x"), ("b", 0, "x"), ("b", 1, "x")], together=1)
    [('a', 0, 'x'), ('b', 1, 'x')]
    """
    missing = {part for row in rows for part in _parts(row, together)}
    used: Counter = Counter()
    chosen = []
    while missing:
        best = max(
            rows,
            key=lambda row: (
                len(missing & _parts(row, together)),
                -sum(used[part] for part in _parts(row, 1)),
            ),
        )
        missing -= _parts(best, together)
        used.update(_parts(best, 1))
        chosen.append(best)
    return chosen


def _parts(row: tuple, count: int) -> set[tuple]:
    """Return the combinations of `count` values of a row, each with its column."""
    return set(combinations(enumerate(row), count))
