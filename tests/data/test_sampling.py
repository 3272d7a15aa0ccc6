"""The sample order is complete, reshuffled each epoch and resumable anywhere; and the random
numbers per sample.
"""

import numpy as np
import pytest

from libai.data import DataError, SampleRandom, SampleStream


@pytest.mark.parametrize(("num_samples", "seed", "text"), [(0, 0, "empty"), (3, -1, "seed=-1")])
def test_impossible_streams_are_refused(num_samples, seed, text):
    with pytest.raises(DataError, match=text):
        SampleStream(num_samples, seed=seed)


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
