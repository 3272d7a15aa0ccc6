"""Random numbers of datasets depend on seed, epoch and sample, whichever generator they use, and no
dataset changes the numbers of the training thread.
"""

import random
import threading
import time

import numpy as np
import oneflow as flow
import pytest

from libai.data import build_eval_loader, build_train_loader
from libai.data.random_state import nobody_reads, random_position
from libai.utils.seeding import generators_kept

SAMPLES = 12
#: reads slower than this are made ahead, in a thread
SLOW = 0.004

DRAWS = {
    "numpy": lambda: np.random.randn(),
    "python": lambda: random.gauss(0, 1),
    "both": lambda: random.random() + np.random.rand(),
    "oneflow": lambda: float(flow.rand(1)),
}


class Noisy:
    """Sample i is (i, a random number). `late`: only the sample of this index is random."""

    def __init__(self, draw, seconds=0.0, late=None):
        self.draw, self.seconds, self.late = draw, seconds, late
        self.threads = set()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        is_random = self.late in (None, index)
        return {"i": index, "x": self.draw() if is_random else 0.0}


def values(batches):
    return {
        (turn, i): x
        for turn, batch in batches
        for i, x in zip(batch["i"].tolist(), batch["x"].tolist())
    }


def read(dataset, micro=3, ranks=1, epochs=2, start=0, **options):
    """Return the random number of each sample, by (epoch, index), read by `ranks` loaders."""
    found = {}
    for rank in range(ranks):
        loader = build_train_loader(
            dataset, micro_batch_size=micro, data_rank=rank, num_data_ranks=ranks, **options
        )
        loader.load_state_dict({"consumed_samples": start})
        step = micro * ranks
        for first in range(start, epochs * SAMPLES, step):
            found |= values([(first // SAMPLES, next(loader))])
        loader.close()
    return found


@pytest.fixture(autouse=True)
def untouched():
    """Check that reading leaves the global generators where they were."""
    before = random_position()
    yield
    assert random_position() == before


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_depend_on_seed_epoch_and_sample_only(draw):
    expected = read(Noisy(DRAWS[draw]))
    assert len(set(expected.values())) == 2 * SAMPLES
    for seconds, workers, micro, ranks in [(0, 4, 3, 1), (SLOW, 0, 6, 2), (SLOW, 4, 2, 3)]:
        dataset = Noisy(DRAWS[draw], seconds)
        assert read(dataset, micro, ranks, num_workers=workers) == expected
    resumed = read(Noisy(DRAWS[draw]), start=18)
    assert resumed == {key: expected[key] for key in resumed}


@pytest.mark.parametrize("draw", ["numpy", "python"])
@pytest.mark.parametrize("seconds", [0, SLOW])
def test_a_late_first_use_is_noticed_and_read_again(draw, seconds, caplog):
    always = read(Noisy(DRAWS[draw]), epochs=1)
    late = [index for _, index in always][-2]
    with generators_kept():
        found = read(Noisy(DRAWS[draw], seconds, late), epochs=1)
    assert found == {key: x if key[1] == late else 0.0 for key, x in always.items()}
    assert "was read again" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_without_random_numbers_are_read_ahead(workers, caplog):
    dataset = Noisy(lambda: 0.5, SLOW)
    read(dataset, num_workers=workers)
    thread = "libai-data-worker" if workers else "libai-read-ahead"
    assert any(name.startswith(thread) for name in dataset.threads)
    assert not caplog.text


def test_other_code_that_uses_a_generator_changes_no_sample():
    loader = build_train_loader(Noisy(lambda: 0.5, SLOW), micro_batch_size=1)
    with generators_kept():
        for _ in range(30):
            assert next(loader)["x"] == 0.5
            time.sleep(SLOW / 2)
            np.random.rand()
    loader.close()


def test_a_collate_function_is_seeded():
    def collate(samples):
        batch = {key: np.array([sample[key] for sample in samples]) for key in samples[0]}
        return {**batch, "x": np.random.rand(len(samples))}

    found = read(Noisy(lambda: 0.0), collate=collate)
    assert len(set(found.values())) == 2 * SAMPLES
    resumed = read(Noisy(lambda: 0.0), start=12, collate=collate)
    assert resumed == {key: found[key] for key in resumed}


@pytest.mark.parametrize("draw", DRAWS)
def test_an_evaluation_dataset_gives_the_same_numbers_each_time(draw):
    loader = build_eval_loader(Noisy(DRAWS[draw]), micro_batch_size=5)
    first, second = (values((0, batch) for batch, _ in loader) for _ in range(2))
    assert first == second
    assert len(set(first.values())) == SAMPLES


def test_oneflows_generator_keeps_its_state_if_no_sample_uses_it():
    flow.manual_seed(3)
    expected = flow.rand(4).numpy()
    flow.manual_seed(3)
    read(Noisy(DRAWS["numpy"]))
    assert (flow.rand(4).numpy() == expected).all()


def test_nobody_reads_while_the_gate_is_closed():
    dataset = Noisy(lambda: 0.5, SLOW)
    loader = build_train_loader(dataset, micro_batch_size=1)
    for _ in range(SAMPLES):
        next(loader)
    with nobody_reads():
        dataset.threads.clear()
        time.sleep(3 * SLOW)
        assert not dataset.threads
    loader.close()
