"""Arrays as a dataset."""

import numpy as np
import pytest

from libai.data import DataError, InMemoryDataset


def test_rows_and_batches():
    dataset = InMemoryDataset(x=[[1, 2], [3, 4], [5, 6]], y=np.arange(3))
    assert len(dataset) == 3
    assert dataset[1]["x"].tolist() == [3, 4] and dataset[1]["y"] == 1
    assert dataset.get_batch(np.array([2, 0]))["x"].tolist() == [[5, 6], [1, 2]]


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, "no arrays"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"'x': \(3,\), 'y': \(2,\)"),
        ({"x": 3}, "first axis counts the samples"),
    ],
)
def test_unequal_arrays_are_refused(arrays, text):
    with pytest.raises(DataError, match=text):
        InMemoryDataset(**arrays)
