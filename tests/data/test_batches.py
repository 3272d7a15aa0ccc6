"""Samples become batches: types, order, padding, and errors that explain the dataset contract."""

import numpy as np
import pytest

from libai.data import (
    DataError,
    InMemoryDataset,
    PadCollate,
    SampleError,
    build_eval_loader,
    build_train_loader,
)
from libai.data.batches import BatchReader


class ListDataset:
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def read(*samples, num_workers=0):
    return BatchReader(ListDataset(*samples), num_workers).read(np.arange(len(samples)))


@pytest.mark.parametrize(
    "value, dtype",
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
    "samples, text",
    [
        ([1], "a sample of ListDataset is a int, not a dict or a tuple: return a dict whose keys"),
        ([(1, 2), (1,)], r"samples of ListDataset have the keys \['x', 'y'\] and \['x'\]"),
        (
            [{"x": 1}, {"y": 1}],
            r"samples of ListDataset have the keys \['x'\] and \['y'\]: every sample",
        ),
        ([{"x": 1}, 3], r"samples of ListDataset have the keys \['x'\] and a int"),
        ([{"x": "word"}], "'x' of ListDataset contains <U4 values"),
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
    with pytest.raises(
        SampleError, match=r"samples 0, 9 of InMemoryDataset failed: index 9 .*\(IndexError\)"
    ):
        BatchReader(InMemoryDataset(x=np.zeros(3))).read(np.array([0, 9]))


@pytest.mark.parametrize(
    "arrays, text",
    [
        ({}, "no arrays"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"'x': \(3,\), 'y': \(2,\)"),
        ({"x": 3}, "first axis"),
    ],
)
def test_unequal_arrays_are_refused(arrays, text):
    with pytest.raises(DataError, match=text):
        InMemoryDataset(**arrays)


PADDING = {"input_ids": 0, "labels": -100}


class Words:
    """Sample i has `lengths[i]` tokens, all of them i + 1."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = np.full(self.lengths[index], index + 1)
        return {"input_ids": tokens, "labels": tokens, "number": index}


def test_a_collate_function_of_the_user_makes_the_batch():
    def collate(samples):
        return {"total": np.array([sample["input_ids"].sum() for sample in samples])}

    options = {"micro_batch_size": 3, "shuffle": False, "collate": collate, "num_workers": 2}
    assert next(build_train_loader(Words([1, 2, 3]), **options))["total"].tolist() == [1, 4, 9]
    with pytest.raises(
        DataError, match="the result of collate for samples of Words is a list, not a dict or"
    ):
        next(build_train_loader(Words([1, 2]), micro_batch_size=2, collate=lambda samples: samples))
    with pytest.raises(DataError, match="collate is a int"):
        build_train_loader(Words([1, 2]), micro_batch_size=2, collate=3)


def test_lengths_of_other_samples_are_refused():
    few = type("Few", (Words,), {"__len__": lambda self: 2})([1, 2, 3])
    with pytest.raises(
        DataError, match=r"Few.lengths has 3 numbers, but the dataset has 2 samples"
    ):
        build_train_loader(few, micro_batch_size=1)


def test_padding_fills_marks_rounds_and_cuts():
    pad = PadCollate(PADDING, multiple_of=4, mask="mask")
    batch = next(build_train_loader(Words([2, 5]), micro_batch_size=2, shuffle=False, collate=pad))
    assert batch["input_ids"].tolist() == [[1, 1] + [0] * 6, [2] * 5 + [0] * 3]
    assert batch["labels"][0].tolist() == [1, 1] + [-100] * 6
    assert batch["mask"].sum(1).tolist() == [2, 5] and batch["number"].tolist() == [0, 1]
    short = PadCollate(PADDING, multiple_of=4, max_length=3)([*Words([2, 5])])
    assert short["input_ids"].tolist() == [[1, 1, 0], [2, 2, 2]]
    with pytest.raises(DataError, match="PadCollate pads 'tokens', but a sample only has"):
        PadCollate({"tokens": 0})([Words([1])[0]])
    with pytest.raises(DataError, match="'labels' differs in shape.*give a padding value for it"):
        PadCollate({"input_ids": 0})([*Words([1, 2])])
    with pytest.raises(DataError, match="a sample has 2 items, but the `lengths`"):
        PadCollate(PADDING).pad_to([*Words([1, 2])], 1)


def test_ranks_pad_alike():
    """Global tensors need equal shapes: the longest sample of all ranks decides."""
    dataset = Words([1, 2, 9, 3, 4, 5, 2, 2])
    options = {"micro_batch_size": 2, "num_data_ranks": 2, "collate": PadCollate(PADDING)}
    for build, order in ((build_train_loader, {"shuffle": False}), (build_eval_loader, {})):
        loaders = [iter(build(dataset, data_rank=rank, **options, **order)) for rank in (0, 1)]
        for longest in (9, 5):
            batches = [
                batch[0] if isinstance(batch, tuple) else batch for batch in map(next, loaders)
            ]
            assert [batch["input_ids"].shape for batch in batches] == [(2, longest)] * 2
