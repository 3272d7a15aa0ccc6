"""Cut a row of blocks into pipeline stages of equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def balance(
    costs: Sequence[float], num_stages: int, before: float = 0.0, behind: float = 0.0, tail: int | None = None
) -> list[int]:
    """How many consecutive blocks each of `num_stages` stages takes so that the dearest stage is as cheap as possible.

    Args:
        costs: of the blocks, in order, in any unit; at least `num_stages` of them.
        before: cost of what runs on the first stage ahead of the blocks.
        behind: cost of what runs behind the blocks, on stage `tail` (default: the last).

    Among equally good cuts the first stages take the fewest blocks.

    >>> balance([1, 1, 1, 1], 2)
    [2, 2]
    >>> balance([1, 1, 1, 1], 2, before=2)
    [1, 3]
    """
    extra = [0.0] * num_stages
    extra[0] += before
    extra[num_stages - 1 if tail is None else tail] += behind
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(stage: int, start: int) -> tuple[float, tuple[int, ...]]:
        left = num_stages - stage - 1
        if left == 0:
            return sums[-1] - sums[start] + extra[stage], (len(costs) - start,)
        candidates = []
        for end in range(start + 1, len(costs) - left + 1):
            dearest, counts = best(stage + 1, end)
            here = sums[end] - sums[start] + extra[stage]
            candidates.append((max(here, dearest), (end - start, *counts)))
        return min(candidates)

    return list(best(0, 0)[1])
