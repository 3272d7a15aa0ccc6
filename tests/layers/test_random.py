"""The random bits of dropout: their dependencies and randomness. test_dropout.py compares the
modes.
"""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from refusals import refused

from libai.layers.random import (
    SeededLayer,
    assign_layer_ids,
    fold,
    random_context,
    random_int32,
)

SHAPE = (64, 96)
KEY = fold(0, 0, 0)


def draw(key=KEY, layer_id=1, shape=SHAPE, data_rank=0):
    like = flow.zeros(*shape)
    with random_context(key, data_rank):
        return random_int32(like, shape, layer_id).numpy()


def uniform(bits):
    """Centred values with variance 1 from int32 bits."""
    return bits.astype(np.float64) / 2.0**31 * np.sqrt(3.0)


def z_of_correlation(a, b):
    """Standard score of the correlation of two centred unit samples: N(0, 1) if they are
    independent.
    """
    return float(np.mean(a * b) * np.sqrt(a.size))


# ----------------------------------------------------------------------------- what they depend on


def test_fold_is_fixed_for_ever():
    # a change here changes every mask of every resumed run
    assert fold(0, 0, 0) == -3010590339456299111
    assert fold(1234, 56, 7) != fold(1234, 7, 56)
    assert fold(0) != fold(0, 0)
    assert -(2**63) <= fold(2**70, -5) < 2**63


# --------------------------------------------------------------------------------- are they random


def neighbour_scores(bits):
    u = uniform(bits)
    return {
        "next column": z_of_correlation(u[:, 1:], u[:, :-1]),
        "next row": z_of_correlation(u[1:], u[:-1]),
        "diagonal": z_of_correlation(u[1:, 1:], u[:-1, :-1]),
        "rectangle": z_of_correlation(u[1:, 1:] * u[:-1, :-1], u[1:, :-1] * u[:-1, 1:]),
    }


def test_neighbouring_elements_are_independent():
    for seed in range(10):
        for name, z in neighbour_scores(draw(fold(seed, 0, 0), shape=(256, 256))).items():
            assert abs(z) < 5, (seed, name)


def test_neighbouring_elements_are_independent_negative_control():
    # one multiplication of the element index, as a naive generator does
    index = np.arange(256 * 256, dtype=np.int64).reshape(256, 256)
    naive = ((index * 1103515245 + 12345) % 2**32 - 2**31).astype(np.int64)
    assert max(abs(z) for z in neighbour_scores(naive).values()) > 50


def largest_score(samples):
    """Largest |z| among the correlations of all pairs of samples."""
    u = np.stack([uniform(s).ravel() for s in samples])
    z = u @ u.T / np.sqrt(u.shape[1])
    np.fill_diagonal(z, 0.0)
    return float(np.abs(z).max())


@pytest.mark.parametrize(
    "samples",
    [
        [{"layer_id": fold(i)} for i in range(60)],
        [{"layer_id": i} for i in range(60)],
        [{"key": fold(0, i, 0)} for i in range(60)],
        [{"key": fold(i, 0, 0)} for i in range(60)],
        [{"data_rank": i} for i in range(60)],
    ],
    ids=["layers", "close layer ids", "iterations", "seeds", "ranks"],
)
def test_all_pairs_are_independent(samples):
    # 1770 pairs: the largest |z| of independent samples stays below 5 with probability 0.999
    assert largest_score([draw(**sample) for sample in samples]) < 5


# -------------------------------------------------------------------------------- ids and contexts


class Leaf(SeededLayer):
    """A seeded layer that does nothing."""


def test_layer_ids_come_from_names_and_survive_a_layer_added_elsewhere():
    small, large = nn.Sequential(), nn.Sequential()
    small.add_module("drop", Leaf())
    large.add_module("first", Leaf())
    large.add_module("drop", Leaf())
    assert assign_layer_ids(small) == ["drop"]
    assert assign_layer_ids(large) == ["first", "drop"]
    assert small.drop.layer_id == large.drop.layer_id != large.first.layer_id


def test_plain_use_follows_manual_seed_and_never_repeats():
    like = flow.zeros(*SHAPE)

    def two_draws(seed):
        flow.manual_seed(seed)
        return [random_int32(like, SHAPE, 1).numpy() for _ in range(2)]

    first, second = two_draws(11)
    assert (first != second).any()
    two_draws(12)
    again = two_draws(11)
    assert (again[0] == first).all()
    assert (again[1] == second).all()


def test_plain_use_in_a_graph_is_refused():
    class Plain(nn.Graph):
        def build(self, x):
            return random_int32(x, x.shape, 1)

    with refused("without a key.*random_context.*model.eval"):
        Plain()(flow.zeros(*SHAPE))
