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

    for num_workers in (0, 2):
        options = {"micro_batch_size": 3, "shuffle": False, "collate": collate, "num_workers": num_workers}
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
        starts = [place for index in members for place in range(lengths[index])]
        assert row["positions"].tolist() == starts + [0] * free
        numbers = [number for number, index in enumerate(members, 1) for _ in range(lengths[index])]
        assert row["segments"].tolist() == numbers + [0] * free
    assert len(packed) <= len(lengths)
    assert sum(sum(lengths[i] for i in row) <= 6 for row in packed.rows) <= 1, "two half-empty rows would be one"


def test_packing_reads_lengths_where_the_dataset_has_none_and_refuses_what_is_too_long():
    class Plain:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"input_ids": np.arange(index + 1), "labels": np.arange(index + 1)}

    assert len(PackedDataset(Plain(), 3, PADDING)) == 2
    with pytest.raises(DataError, match="sample 2 of Plain has the length 3, and rows have sequence_length=2"):
        PackedDataset(Plain(), 2, PADDING)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_groups_of_similar_length_visit_every_sample_once_an_epoch(lengths, group):
    stream = SampleStream(len(lengths), seed=5, lengths=np.array(lengths), group=group)
    for epoch in range(2):
        visited = stream.indices(epoch * len(lengths), (epoch + 1) * len(lengths))
        assert sorted(visited.tolist()) == list(range(len(lengths)))


def test_groups_of_similar_length_need_less_padding_and_differ_between_epochs():
    lengths = np.random.default_rng(0).integers(1, 200, 4000)

    def padding(stream, epoch):
        order = stream.indices(epoch * 4000, (epoch + 1) * 4000).reshape(-1, 16)
        return (lengths[order].max(1) * 16).sum() / lengths.sum() - 1

    grouped = SampleStream(4000, seed=1, lengths=lengths, group=16)
    plain = SampleStream(4000, seed=1)
    assert padding(grouped, 0) < 0.1 < 0.5 < padding(plain, 0)
    assert not np.array_equal(grouped.indices(0, 4000), grouped.indices(4000, 8000))
    longest = lengths[grouped.indices(0, 4000)].reshape(-1, 16).max(1)
    assert abs(np.corrcoef(longest[:50], np.arange(50))[0, 1]) < 0.4, "short ones do not come first"


def test_a_resumed_loader_keeps_the_groups_whatever_the_ranks():
    dataset = Words(np.random.default_rng(0).integers(1, 30, 64))
    options = {"collate": PadCollate(PADDING), "group_by_length": 8, "seed": 2}
    first = build_train_loader(dataset, micro_batch_size=8, **options)
    for _ in range(3):
        next(first)
    second = [build_train_loader(dataset, micro_batch_size=4, data_rank=r, num_data_ranks=2, **options) for r in (0, 1)]
    for loader in second:
        loader.load_state_dict(first.state_dict())
    expected = next(first)
    found = [next(loader) for loader in second]
    assert np.array_equal(np.concatenate([batch["input_ids"] for batch in found]), expected["input_ids"])


def test_lengths_must_be_there():
    with pytest.raises(DataError, match="lengths must hold the length of every sample; it has no such attribute"):
        build_train_loader({"x": np.zeros(3)}, micro_batch_size=1, group_by_length=2)
    dataset = Words([1, 2])
    dataset.lengths = [1, 2, 3]
    with pytest.raises(DataError, match="group_by_length=2 with shuffle=False"):
        build_train_loader(Words([1, 2]), micro_batch_size=1, group_by_length=2, shuffle=False)
