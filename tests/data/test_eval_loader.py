"""The evaluation loader counts every sample once, and shapes and flags agree between ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai.data import DataError, InMemoryDataset, build_eval_loader


def loaders(num_samples, micro, ranks, **options):
    dataset = InMemoryDataset(x=np.arange(num_samples))
    return [
        build_eval_loader(
            dataset, micro_batch_size=micro, data_rank=r, num_data_ranks=ranks, **options
        )
        for r in range(ranks)
    ]


@pytest.mark.promise
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
    assert len(loaders(num_samples, micro, ranks)[0]) == len(
        list(loaders(num_samples, micro, ranks)[0])
    )


@pytest.mark.parametrize(
    "count, options, text", [(0, {}, "empty"), (3, {"max_batches": 0}, "max_batches=0")]
)
def test_nothing_to_evaluate_is_refused(count, options, text):
    with pytest.raises(DataError, match=text):
        loaders(count, 2, 1, **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_limit_counts_global_batches(num_ranks):
    """An incomplete last batch consists of several items, which belong together."""
    for limit in (1, 2, 9):
        samples = min(9, limit * 4 * num_ranks)
        for each, whole in zip(
            loaders(9, 4, num_ranks, max_batches=limit), loaders(9, 4, num_ranks)
        ):
            assert len(each) == whole.num_items(limit)
        parts = loaders(9, 4, num_ranks, max_batches=limit)
        found = [np.asarray(next(iter(batch.values()))) for part in parts for batch, _ in part]
        assert len({value.tobytes() for rows in found for value in rows}) == samples
