"""`balance` against trying every cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai.parallel.plan import balance


def dearest(costs, counts, before, behind, tail) -> float:
    extra = [0] * len(counts)
    extra[0] += before
    extra[tail] += behind
    ends = list(itertools.accumulate(counts))
    return max(sum(costs[end - count : end]) + more for end, count, more in zip(ends, counts, extra))


def every_cut(num_blocks: int, num_stages: int):
    for ends in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield [b - a for a, b in zip((0, *ends), (*ends, num_blocks))]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_other_cut_has_a_cheaper_dearest_stage(data):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, len(costs)))
    before, behind = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    tail = data.draw(st.integers(0, stages - 1))
    counts = balance(costs, stages, before, behind, tail)
    assert sum(counts) == len(costs) and min(counts) >= 1 and len(counts) == stages
    best = min(dearest(costs, cut, before, behind, tail) for cut in every_cut(len(costs), stages))
    assert dearest(costs, counts, before, behind, tail) == best


def test_the_check_sees_a_worse_cut():
    assert dearest([1, 1, 1, 1], [1, 3], 0, 0, 1) > dearest([1, 1, 1, 1], balance([1, 1, 1, 1], 2), 0, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [(([1, 1, 1], 2), [1, 2]), (([5, 1, 1], 2), [1, 2]), (([1] * 4, 2, 2, 0), [1, 3]), (([1] * 4, 2, 0, 2), [3, 1])],
)
def test_cuts_by_hand(arguments, counts):
    assert balance(*arguments) == counts
