"""Samples of different lengths: collate functions, packing, groups of similar length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_datasets import Words

from libai.data import DataError, PackedDataset, PadCollate, build_eval_loader, build_train_loader
from libai.data.loading.sampling import SampleStream

PADDING = {"input_ids": 0, "labels": -100}
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


def test_a_collate_function_of_the_user_makes_the_batch():
    def collate(samples):
        return {"total": np.array([sample["input_ids"].sum() for sample in samples])}

    options = {"micro_batch_size": 3, "shuffle": False, "collate": collate, "num_workers": 2}
    assert next(build_train_loader(Words([1, 2, 3]), **options))["total"].tolist() == [1, 4, 9]
    with pytest.raises(DataError, match="collate returned a list, not a dict"):
        next(build_train_loader(Words([1, 2]), micro_batch_size=2, collate=lambda samples: samples))
    with pytest.raises(DataError, match="collate is a int"):
        build_train_loader(Words([1, 2]), micro_batch_size=2, collate=3)


def test_padding_fills_marks_rounds_and_cuts():
    pad = PadCollate(PADDING, multiple_of=4, mask="mask")
    batch = next(build_train_loader(Words([2, 5]), micro_batch_size=2, shuffle=False, collate=pad))
    assert batch["input_ids"].tolist() == [[1, 1] + [0] * 6, [2] * 5 + [0] * 3]
    assert batch["labels"][0].tolist() == [1, 1] + [-100] * 6
    assert batch["mask"].sum(1).tolist() == [2, 5] and batch["number"].tolist() == [0, 1]
    short = PadCollate(PADDING, multiple_of=4, max_length=3)([Words([2, 5])[i] for i in (0, 1)])
    assert short["input_ids"].tolist() == [[1, 1, 0], [2, 2, 2]]
    with pytest.raises(DataError, match="PadCollate pads 'tokens', and a sample has"):
        PadCollate({"tokens": 0})([Words([1])[0]])
    with pytest.raises(DataError, match="'labels' differs in shape.*name a value to pad it with"):
        PadCollate({"input_ids": 0})([Words([1, 2])[i] for i in (0, 1)])


def test_ranks_pad_alike():
    """Global tensors need equal shapes: the longest sample of all ranks decides."""
    dataset = Words([1, 2, 9, 3, 4, 5, 2, 2])
    for build in (build_train_loader, build_eval_loader):
        options = {"micro_batch_size": 2, "num_data_ranks": 2, "collate": PadCollate(PADDING)}
        order = {"shuffle": False} if build is build_train_loader else {}
        loaders = [iter(build(dataset, data_rank=rank, **options, **order)) for rank in (0, 1)]
        for longest in (9, 5):
            batches = [next(loader) for loader in loaders]
            batches = [batch[0] if isinstance(batch, tuple) else batch for batch in batches]
            assert [batch["input_ids"].shape for batch in batches] == [(2, longest)] * 2


@settings(deadline=None)
@given(LENGTHS)
def test_packing_keeps_every_sample_whole_and_once(lengths):
    packed = PackedDataset(Words(lengths), 12, PADDING, segments="segments", positions="positions")
    assert sorted(index for row in packed.rows for index in row) == list(range(len(lengths)))
    for row, members in zip((packed[i] for i in range(len(packed))), packed.rows):
        expected = [index + 1 for index in members for _ in range(lengths[index])]
        free = 12 - len(expected)
        assert row["input_ids"].tolist() == expected + [0] * free
        assert row["labels"].tolist() == expected + [-100] * free
        numbers = [number for number, index in enumerate(members, 1) for _ in range(lengths[index])]
        assert row["segments"].tolist() == numbers + [0] * free
        assert row["positions"].tolist()[: lengths[members[0]]] == list(range(lengths[members[0]]))


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(DataError, match="sample 2 of Words has the length 3, and rows have sequence_length=2"):
        PackedDataset(Words([1, 2, 3]), 2, PADDING)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_groups_of_similar_length_visit_every_sample_once_an_epoch(lengths, group):
    stream = SampleStream(len(lengths), seed=5, lengths=np.array(lengths), group=group)
    for epoch in range(2):
        visited = stream.indices(epoch * len(lengths), (epoch + 1) * len(lengths))
        assert sorted(visited.tolist()) == list(range(len(lengths)))


def test_lengths_must_be_there():
    with pytest.raises(DataError, match="lengths must hold the length of every sample; it has no such attribute"):
        build_train_loader({"x": np.zeros(3)}, micro_batch_size=1, group_by_length=2)
    with pytest.raises(DataError, match="group_by_length=2 with shuffle=False"):
        build_train_loader(Words([1, 2]), micro_batch_size=1, group_by_length=2, shuffle=False)
