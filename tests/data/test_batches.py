"""From samples to batches: types, order, and the errors that teach the dataset contract."""

import numpy as np
import pytest

from libai.data import DataError, InMemoryDataset, SampleError
from libai.data.loading.batches import BatchReader


class ListDataset:
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def read(*samples, num_workers=0):
    reader = BatchReader(ListDataset(*samples), num_workers)
    try:
        return reader.read(np.arange(len(samples)))
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.uint16(3), np.int64),
        (0.5, np.float32),
        (np.float16(0.5), np.float32),
        (True, np.bool_),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_numbers_become_int64_float32_or_bool(value, dtype, num_workers):
    batch = read({"x": value}, {"x": value}, {"x": value}, num_workers=num_workers)
    assert batch["x"].dtype == dtype and batch["x"].shape == (3,)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([(1, 2)], "sample 0 of ListDataset is a tuple, not a dict: return a dict whose keys"),
        ([{"x": 1}, {"y": 1}], r"sample 1 of ListDataset has the keys \['y'\], others have \['x'\]"),
        ([{"x": "word"}], "'x' of ListDataset holds <U4 values"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], "pad or crop"),
    ],
)
def test_samples_that_cannot_become_a_batch_are_explained(samples, text, num_workers):
    with pytest.raises(DataError, match=text):
        read(*samples, num_workers=num_workers)


def test_get_batch_must_return_one_row_per_sample():
    class Short(InMemoryDataset):
        def get_batch(self, indices):
            return {"x": np.zeros(1)}

    with pytest.raises(DataError, match=r"'x' of Short has the shape \(1,\) for 3 samples"):
        BatchReader(Short(x=np.zeros(3))).read(np.arange(3))


def test_a_failing_get_batch_names_the_samples():
    with pytest.raises(SampleError, match=r"samples 0, 9 of InMemoryDataset failed: index 9 .*\(IndexError\)"):
        BatchReader(InMemoryDataset(x=np.zeros(3))).read(np.array([0, 9]))


@pytest.mark.parametrize(
    ("arrays", "text"),
    [({}, "no arrays"), ({"x": np.zeros(3), "y": np.zeros(2)}, r"'x': \(3,\), 'y': \(2,\)"), ({"x": 3}, "first axis")],
)
def test_unequal_arrays_are_refused(arrays, text):
    with pytest.raises(DataError, match=text):
        InMemoryDataset(**arrays)
