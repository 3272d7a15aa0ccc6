"""The loop does not wait for data: reading goes on during a step, and memory-mapped tokens are not copied."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import toy

from libai.data import TokenDataset, build_train_loader, prepare_tokens

SIZE = 4
#: batches until reading has proved slow enough for the background thread, with room to spare
PROVED = 8


class SlowToRead:
    """5 ms a batch, which is slow enough to be read ahead; counts the batches that have been read."""

    def __init__(self):
        self.num_read, self.changed = 0, threading.Condition()
        self.data = {name: np.concatenate([b[name] for b in toy.batches(8, SIZE)]) for name in ("x", "y")}

    def __len__(self):
        return len(self.data["y"])

    def get_batch(self, indices):
        time.sleep(0.005)
        with self.changed:
            self.num_read += 1
            self.changed.notify_all()
        return {name: values[indices] for name, values in self.data.items()}

    def wait_for(self, count, seconds):
        """Whether `count` batches have been read within `seconds`."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_read >= count, seconds)


def read_during_steps(prefetch, mode, seconds):
    """For each late iteration: whether the next batch was read while its update had not returned."""
    dataset = SlowToRead()
    loader = build_train_loader(dataset, micro_batch_size=SIZE, prefetch=prefetch)
    model = toy.Classifier()
    trainer = toy.trainer_of(mode, model, loader, toy.optimizer_of("sgd", model))
    update, seen = trainer.update, []

    def slow_update(micro_batches):
        result = update(micro_batches)
        if trainer.iter >= PROVED:
            # iteration i has taken batch i; one more must come without anybody asking for it
            seen.append(dataset.wait_for(trainer.iter + 2, seconds))
        return result

    trainer.update = slow_update
    trainer.train(0, PROVED + 3)
    loader.close()
    return seen


def test_the_next_batch_is_read_while_the_step_runs(mode):
    assert read_during_steps(2, mode, seconds=20) == [True] * 3


def test_without_prefetch_it_is_not(mode):
    assert read_during_steps(0, mode, seconds=0.2) == [False] * 3


@pytest.fixture
def tokens(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"{number} words of a text that is long enough to cut " * 40)
    folder = prepare_tokens(str(tmp_path / "*.txt"), cache_dir=tmp_path / "cache", validation_fraction=0.2)
    return TokenDataset(folder, sequence_length=32)


def test_windows_are_views_of_the_memory_map(tokens):
    assert isinstance(tokens.tokens, np.memmap)
    assert np.shares_memory(tokens._windows, tokens.tokens)


def test_a_batch_becomes_a_tensor_without_another_copy(tokens):
    """The gathered int64 rows are the tensor's memory: a change of the one is seen in the other."""
    model = toy.Classifier()
    loader = build_train_loader(tokens, micro_batch_size=SIZE, shuffle=False, prefetch=0)
    trainer = toy.trainer_of("eager", model, loader, toy.optimizer_of("sgd", model))
    array = next(loader)["input_ids"]
    tensor = trainer.forward_pass.tensor(array)
    array[0, 0] = 77
    assert array.flags["C_CONTIGUOUS"] and tensor.numpy()[0, 0] == 77
    copied = trainer.forward_pass.tensor(array.copy())
    array[0, 0] = 78
    assert copied.numpy()[0, 0] == 77
