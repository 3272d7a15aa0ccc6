"""The evaluation loader: every sample counts once, shapes and flags agree between ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai.data import DataError, InMemoryDataset, build_eval_loader


def loaders(num_samples, micro, ranks, **options):
    dataset = InMemoryDataset(x=np.arange(num_samples))
    return [
        build_eval_loader(dataset, micro_batch_size=micro, data_rank=r, num_data_ranks=ranks, **options)
        for r in range(ranks)
    ]


@settings(max_examples=80, deadline=None)
@given(num_samples=st.integers(1, 60), micro=st.integers(1, 9), ranks=st.sampled_from([1, 2, 3, 4]))
def test_every_sample_counts_exactly_once(num_samples, micro, ranks):
    counted = []
    for step in zip(*loaders(num_samples, micro, ranks)):
        batches = [batch["x"].tolist() for batch, _ in step]
        (replicated,) = {flag for _, flag in step}
        assert len({len(batch) for batch in batches}) == 1, "collectives need equal shapes"
        assert len(batches[0]) <= micro
        if replicated:
            assert all(batch == batches[0] for batch in batches)
            counted += batches[0]
        else:
            assert len(batches[0]) == micro
            counted += [x for batch in batches for x in batch]
    assert counted == list(range(num_samples))


def test_the_length_is_the_number_of_batches_on_every_rank():
    for loader in loaders(29, 4, 2):
        assert len(loader) == len(list(loader)) == 5  # 3 full, and 5 left over as 4 + 1


def test_iterating_again_starts_from_the_front():
    (loader,) = loaders(5, 2, 1)
    next(iter(loader))
    assert [batch["x"].tolist() for batch, _ in loader] == [[0, 1], [2, 3], [4]]
    assert len(list(loader)) == 3


def test_max_batches_keeps_the_first_ones():
    (loader,) = loaders(10, 2, 1, max_batches=2)
    assert len(loader) == 2
    assert [batch["x"].tolist() for batch, _ in loader] == [[0, 1], [2, 3]]


def test_workers_do_not_change_the_batches():
    (plain,), (threaded,) = loaders(7, 3, 1), loaders(7, 3, 1, num_workers=2)
    assert [b["x"].tolist() for b, _ in plain] == [b["x"].tolist() for b, _ in threaded]


@pytest.mark.parametrize(("count", "options", "text"), [(0, {}, "empty"), (3, {"max_batches": 0}, "max_batches=0")])
def test_nothing_to_evaluate_is_refused(count, options, text):
    with pytest.raises(DataError, match=text):
        loaders(count, 2, 1, **options)
