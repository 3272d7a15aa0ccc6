"""The README is correct: the run stops at the target and not before, and both modes give the same
curve.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from project_runs import losses_in, train, train_in_both_modes

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from model import SpeedrunGPT  # noqa: E402

CONFIG = PROJECT / "config.py"
SHORT = (
    *(
        "train.train_iter=6",
        "train.evaluation.eval_period=2",
        "train.evaluation.eval_iter=1",
    ),
    *("train.train_micro_batch_size=2", "model.num_layers=1", "model.hidden_size=16"),
)


@pytest.mark.e2e
@pytest.mark.parametrize(("target", "iterations"), [(1.0, 6), (100.0, 2)])
def test_it_stops_at_the_first_evaluation_that_reaches_the_target(tmp_path, target, iterations):
    run = train(CONFIG, tmp_path, *SHORT, f"train.extra_hooks.0.target={target}")
    assert len(losses_in(tmp_path)) == iterations
    assert run.trainer.status == ("finished" if iterations == 6 else "stopped")


@pytest.mark.e2e
def test_both_modes_give_one_curve(tmp_path):
    losses = train_in_both_modes(CONFIG, tmp_path, *SHORT)
    assert losses[-1] < losses[0]


def test_a_position_sees_the_bytes_before_it_and_none_behind():
    flow.manual_seed(0)
    model = SpeedrunGPT(11, 8, num_previous=2, hidden_size=8, num_layers=1, num_heads=2).eval()

    def changed_by_another_byte() -> list[bool]:
        ids = np.arange(8)[None]
        other = np.where(ids == 4, 9, ids)
        with flow.no_grad():
            before, after = (model(flow.tensor(each))["logits"].numpy() for each in (ids, other))
        return (np.abs(after - before).max(axis=(0, 2)) > 0).tolist()

    assert changed_by_another_byte() == [False] * 4 + [True] * 3 + [
        False
    ]  # initially, each block is the identity
    nn.init.normal_(model.blocks[0].attention.out.weight)
    assert changed_by_another_byte() == [False] * 4 + [True] * 4
