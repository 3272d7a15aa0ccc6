"""Batch and length arithmetic."""

import dataclasses
from types import SimpleNamespace

import pytest
from refusals import refused

from libai.config import BatchSizes
from libai.engine import BatchPlan

SIZES = BatchSizes(micro=4, accumulation=2, global_=24)


def make(samples_per_epoch=None, **lengths):
    train = SimpleNamespace(**{"train_iter": 0, "train_epoch": 0, "warmup_ratio": 0.0, **lengths})
    return BatchPlan.of(train, SIZES, 3, SimpleNamespace(samples_per_epoch=samples_per_epoch))


def test_iterations_count_as_given():
    plan = make(train_iter=100, warmup_ratio=0.1)
    assert (plan.train_iter, plan.warmup_iter, plan.global_batch_size) == (100, 10, 24)
    assert plan.iters_per_epoch is None


def test_epochs_are_rounded_up_to_whole_iterations():
    assert make(train_epoch=2, samples_per_epoch=100).train_iter == 9  # 200 / 24 = 8.33
    assert make(train_epoch=0.5, samples_per_epoch=96).train_iter == 2


def test_epochs_of_a_loader_without_length_are_refused():
    with refused("train.train_epoch=2 requires.*no samples_per_epoch.*train.train_iter"):
        make(train_epoch=2)


def test_the_plan_is_frozen_and_describes_itself():
    plan = make(train_iter=8, samples_per_epoch=96)
    assert plan.describe() == "24 samples = 4 micro-batch x 3 data ranks x 2 accumulation"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.train_iter = 9


def test_a_resume_with_another_batch_size_counts_real_epochs():
    """Four iterations of 12 samples were one epoch; the second one has two iterations of 24."""
    train = SimpleNamespace(train_iter=0, train_epoch=2, warmup_ratio=0.0)
    loader = SimpleNamespace(samples_per_epoch=48)
    plan = BatchPlan.of(train, SIZES, 3, loader, resumed=(4, 48))
    assert plan.train_iter == 6
    assert [plan.epoch.passes(completed) for completed in (4, 5, 6)] == [1.0, 1.5, 2.0]
    assert [plan.epoch.ends(completed) for completed in (5, 6)] == [False, True]
