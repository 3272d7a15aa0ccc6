"""Eager training keeps input tensors until it waits anyway, and no longer (docs/decisions/0009-inputs-are-held.md)."""

from __future__ import annotations

import sys

import pytest
import toy

from libai.engine import HookBase
from libai.engine.trainer import eager as module


def make_trainer(mode, count, **options):
    model = toy.Classifier()
    return toy.trainer_of(mode, model, toy.batches(count), toy.optimizer_of("sgd", model), **options)


class Watch(HookBase):
    """Notes how many batches are held after each iteration, and reads the losses every `period` iterations."""

    def __init__(self, period):
        self.period, self.held, self.seconds = period, [], []

    def after_step(self):
        self.held.append(len(getattr(self.trainer, "_held", ())))
        self.seconds.append(sys.getswitchinterval())
        if (self.trainer.iter + 1) % self.period == 0:
            self.trainer.fetch_metrics()


def test_so_many_bytes_are_enough(monkeypatch):
    size = module.num_bytes(toy.batches(1)[0])
    monkeypatch.setattr(module, "MAX_HELD_BYTES", 2 * size + 1)
    trainer, watch = make_trainer("eager", 6), Watch(period=100)
    trainer.register_hooks([watch])
    trainer.train(0, 6)
    assert watch.held == [1, 2, 1, 2, 1, 2]
    assert not trainer._held  # the end of a run reads the losses


@pytest.mark.parametrize("usual", [5e-3, 1e-6])
def test_threads_switch_quickly_during_eager_training_only(mode, usual):
    before = sys.getswitchinterval()
    trainer, watch = make_trainer(mode, 3), Watch(period=100)
    trainer.register_hooks([watch])
    sys.setswitchinterval(usual)
    try:
        trainer.train(0, 3)
        assert sys.getswitchinterval() == pytest.approx(usual, rel=0.01)
    finally:
        sys.setswitchinterval(before)
    expected = min(usual, 1e-4) if mode == "eager" else usual
    assert watch.seconds == pytest.approx([expected] * 3, rel=0.01)
