"""The loop does not wait for data: reading goes on during a step, and memory-mapped tokens are not copied."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import toy

from libai.data import build_train_loader

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


@pytest.mark.e2e
def test_the_next_batch_is_read_while_the_step_runs(mode):
    assert read_during_steps(2, mode, seconds=20) == [True] * 3


@pytest.mark.e2e
def test_without_prefetch_it_is_not(mode):
    assert read_during_steps(0, mode, seconds=0.2) == [False] * 3
