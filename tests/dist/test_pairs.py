"""Rows that are tested daily contain every pair of values that the whole table contains."""

import itertools

import pytest
from pairs import daily_rows

pytestmark = pytest.mark.dist
MODELS = [f"model {number}" for number in range(9)]
TABLE = [
    row
    for row in itertools.product(MODELS, ("eager", "graph"), ("dp2", "tp2", "pp2"), (1, 2))
    if row[2] != "tp2" or row[0] in MODELS[:4]  # as models without a plan
]


def pairs_in(rows):
    columns = list(itertools.combinations(range(4), 2))
    return {(i, row[i], j, row[j]) for row in rows for i, j in columns}


def test_every_pair_of_values_is_chosen():
    chosen = daily_rows(TABLE)
    assert pairs_in(chosen) == pairs_in(TABLE)
    assert len(chosen) == len(set(chosen)) <= len(TABLE) / 3  # 22 pairs of a model and a mesh
    assert pairs_in(chosen[:-1]) != pairs_in(TABLE)  # negative control
