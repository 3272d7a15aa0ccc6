"""The sample order: complete, reshuffled, resumable anywhere, and the random numbers that go with it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai.data import DataError, SampleRandom, SampleStream


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5), st.booleans())
def test_every_epoch_visits_every_sample_once(num_samples, seed, epoch, shuffle):
    stream = SampleStream(num_samples, seed=seed, shuffle=shuffle)
    visited = stream.indices(epoch * num_samples, (epoch + 1) * num_samples)
    assert sorted(visited.tolist()) == list(range(num_samples))
    assert visited.dtype == np.int64


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_the_stream_does_not_depend_on_how_it_is_cut(num_samples, cuts):
    cuts = [0, *sorted(cuts)]
    pieces = [SampleStream(num_samples, seed=3).indices(a, b) for a, b in zip(cuts, cuts[1:]) if b > a]
    whole = SampleStream(num_samples, seed=3).indices(0, cuts[-1]) if cuts[-1] else []
    assert [i for piece in pieces for i in piece] == list(whole)


def test_epochs_and_seeds_are_shuffled_differently():
    first, second = SampleStream(100, seed=0).indices(0, 200).reshape(2, 100).tolist()
    other = SampleStream(100, seed=1).indices(0, 100).tolist()
    assert first != second and first != other and first != sorted(first)


def test_without_shuffling_the_samples_come_in_order():
    assert SampleStream(3, shuffle=False).indices(2, 8).tolist() == [2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(("num_samples", "seed", "text"), [(0, 0, "empty"), (3, -1, "seed=-1")])
def test_impossible_streams_are_refused(num_samples, seed, text):
    with pytest.raises(DataError, match=text):
        SampleStream(num_samples, seed=seed)


def test_random_numbers_belong_to_the_position_not_to_the_batch():
    whole = SampleRandom(7, np.arange(100, 110)).uniform(4)
    part = SampleRandom(7, np.arange(105, 108)).uniform(2)
    assert whole.shape == (10, 4)
    assert np.array_equal(whole[5:8, :2], part)


def test_random_numbers_are_uniform_and_independent():
    draws = np.concatenate([SampleRandom(seed, np.arange(5000)).uniform(4) for seed in (0, 1)], axis=1)
    assert draws.min() >= 0 and draws.max() < 1
    # Standard deviations of the mean and of the correlations over 5000 draws are 0.004 and 0.014: six of them.
    assert np.abs(draws.mean(0) - 0.5).max() < 0.025
    assert np.abs(draws.var(0) - 1 / 12).max() < 0.006
    correlations = np.corrcoef(draws, rowvar=False) - np.eye(8)
    assert np.abs(correlations).max() < 0.085
    neighbours = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    assert abs(neighbours) < 0.085
