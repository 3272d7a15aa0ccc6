"""The sample order is complete, reshuffled each epoch and resumable anywhere; and the random
numbers per sample.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai.data import DataError, SampleRandom, SampleStream


@pytest.mark.parametrize("num_samples, seed, text", [(0, 0, "empty"), (3, -1, "seed=-1")])
def test_impossible_streams_are_refused(num_samples, seed, text):
    with pytest.raises(DataError, match=text):
        SampleStream(num_samples, seed=seed)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
    start=st.integers(0, 120),
)
def test_each_sample_comes_once_per_epoch_from_any_point(num_samples, seed, shuffle, start):
    """tests/data/test_train_loader.py compares the layouts of ranks."""

    def read(start):
        stream = SampleStream(num_samples, seed=seed, shuffle=shuffle)
        return stream.indices(start, 2 * num_samples).tolist()

    whole = read(0)
    for epoch in (whole[:num_samples], whole[num_samples:]):
        assert sorted(epoch) == list(range(num_samples))
    if num_samples > 20:  # shorter orders may be equal by chance
        assert (whole[:num_samples] != whole[num_samples:]) is shuffle
    start %= 2 * num_samples
    assert read(start) == whole[start:]


def test_random_numbers_are_uniform_and_independent():
    draws = np.concatenate(
        [SampleRandom(seed, np.arange(5000)).uniform(4) for seed in (0, 1)], axis=1
    )
    assert draws.min() >= 0 and draws.max() < 1
    # Standard deviations of the mean and of the correlations over 5000 draws are 0.004 and 0.014:
    # six of them.
    assert np.abs(draws.mean(0) - 0.5).max() < 0.025
    correlations = np.corrcoef(draws, rowvar=False) - np.eye(8)
    assert np.abs(correlations).max() < 0.085
