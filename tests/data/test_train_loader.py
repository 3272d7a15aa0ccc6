"""The training loader gives the same global batches for any layout, resumes exactly, and raises
errors at the right place.
"""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai.data import DataError, InMemoryDataset, SampleError, build_train_loader


def numbers(count):
    return InMemoryDataset(x=np.arange(count))


def take(loader, count):
    return [next(loader)["x"].tolist() for _ in range(count)]


def global_batches(num_samples, micro, ranks, accumulation, iterations, **options):
    """Return the sorted samples of all ranks and micro-batches for each iteration."""
    loaders = [
        build_train_loader(
            numbers(num_samples),
            micro_batch_size=micro,
            data_rank=r,
            num_data_ranks=ranks,
            **options,
        )
        for r in range(ranks)
    ]
    batches = []
    for _ in range(iterations):
        batches.append(
            sorted(
                x
                for _ in range(accumulation)
                for loader in loaders
                for x in next(loader)["x"].tolist()
            )
        )
    return batches, loaders[0].state_dict()["consumed_samples"]


@pytest.mark.promise
@settings(max_examples=30, deadline=None)
@given(
    num_samples=st.integers(1, 50),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    iterations=st.integers(1, 8),
)
def test_every_layout_sees_the_same_global_batches(num_samples, seed, shuffle, iterations):
    options = {"seed": seed, "shuffle": shuffle}
    layouts = [(8, 1, 1), (4, 2, 1), (2, 4, 1), (2, 1, 4), (1, 4, 2), (2, 2, 2)]
    results = [global_batches(num_samples, *layout, iterations, **options) for layout in layouts]
    assert all(result == results[0] for result in results)


PROOF = 5  # more micro-batches than it takes to prove that reading is slow


class SlowDataset:
    """Slow enough for the loader to read ahead after `PROOF` batches, and remembers what was
    read.
    """

    def __init__(self, count, seconds=0.02, broken=()):
        self.count, self.seconds, self.broken = count, seconds, set(broken)
        self.read = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.seconds)
        self.read.append(index)
        if index in self.broken:
            raise OSError("disk gone")
        return {"x": index}


@pytest.mark.parametrize("num_workers, prefetch", [(0, 0), (0, 3), (3, 0), (3, 2)])
def test_threads_change_neither_the_batches_nor_the_state(num_workers, prefetch):
    expected = take(build_train_loader(numbers(10), micro_batch_size=4, seed=5), PROOF + 4)
    loader = build_train_loader(
        SlowDataset(10, 0.003),
        micro_batch_size=4,
        seed=5,
        num_workers=num_workers,
        prefetch=prefetch,
    )
    assert take(loader, PROOF + 4) == expected
    assert loader.state_dict() == {"consumed_samples": 4 * (PROOF + 4)}
    loader.close()


def test_only_delivered_batches_count_as_consumed():
    dataset = SlowDataset(100)
    loader = build_train_loader(dataset, micro_batch_size=1, prefetch=3)
    delivered = take(loader, PROOF)
    deadline = time.monotonic() + 60
    while len(dataset.read) < PROOF + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(dataset.read) == PROOF + 3, "three ahead, and no more"
    state = loader.state_dict()
    assert state == {"consumed_samples": PROOF}
    following = take(loader, 4)
    loader.load_state_dict(state)
    assert take(loader, 4) == following
    assert delivered + following == take(
        build_train_loader(numbers(100), micro_batch_size=1), PROOF + 4
    )
    loader.close()


@pytest.mark.parametrize("num_workers, prefetch", [(0, 0), (0, 2), (2, 2)])
def test_a_failing_sample_is_named_where_its_batch_would_have_come(num_workers, prefetch):
    first = 3 * PROOF
    dataset = SlowDataset(first + 12, broken=[first + 7])
    loader = build_train_loader(
        dataset, micro_batch_size=3, shuffle=False, num_workers=num_workers, prefetch=prefetch
    )
    take(loader, PROOF + 2)
    with pytest.raises(
        SampleError, match=f"sample {first + 7} of SlowDataset failed: disk gone"
    ) as caught:
        next(loader)
    assert isinstance(caught.value.__cause__, OSError)
    assert loader.state_dict() == {"consumed_samples": first + 6}
    dataset.broken.clear()
    again = [x - first for batch in take(loader, 2) for x in batch]
    assert again == [6, 7, 8, 9, 10, 11], "the same samples are read again, none is skipped"
    loader.close()


def test_augmentation_follows_the_stream_not_the_layout():
    class Noisy(InMemoryDataset):
        def augment_batch(self, batch, random):
            return {"x": batch["x"], "noise": random.uniform(1)[:, 0]}

    def visits(micro, start, steps):
        loader = build_train_loader(Noisy(x=np.arange(5)), micro_batch_size=micro, seed=2)
        loader.load_state_dict({"consumed_samples": start})
        return [
            pair for _ in range(steps) for pair in zip(*(v.tolist() for v in next(loader).values()))
        ]

    whole = visits(1, 0, 12)
    assert visits(4, 0, 3) == whole
    assert visits(2, 6, 3) == whole[6:]
    by_sample = {x: [noise for y, noise in whole[:10] if y == x] for x in range(5)}
    assert all(len(set(noise)) == 2 for noise in by_sample.values()), (
        "two epochs, two different numbers"
    )


@pytest.mark.parametrize(
    "options, text",
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"data_rank": 2, "num_data_ranks": 2}, "data_rank=2: .*0 <= data_rank < 2"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"dataset": numbers(0)}, "InMemoryDataset is empty"),
        ({"dataset": iter([1])}, "without len"),
    ],
)
def test_impossible_arguments_are_refused(options, text):
    with pytest.raises(DataError, match=text):
        build_train_loader(**{"dataset": numbers(4), "micro_batch_size": 2, **options})


@pytest.mark.parametrize("state", [{}, {"consumed_samples": -1}, {"consumed_samples": 1.5}])
def test_a_foreign_state_is_refused(state):
    with pytest.raises(DataError, match="consumed_samples"):
        build_train_loader(numbers(4), micro_batch_size=2).load_state_dict(state)
