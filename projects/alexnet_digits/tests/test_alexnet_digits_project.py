"""The README is correct: both modes give the same curve, and dropout is active only in training."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from project_runs import train_in_both_modes

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from alexnet import AlexNet  # noqa: E402

from libai.utils.errors import UserError  # noqa: E402


@pytest.mark.e2e
def test_both_modes_give_one_curve(tmp_path):
    settings = ("train.train_iter=30", "train.evaluation.enabled=false")
    losses = train_in_both_modes(PROJECT / "alexnet_digits.py", tmp_path, *settings)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_dropout_acts_in_training_only():
    flow.manual_seed(1)
    model = AlexNet(8, 1, 10, width=4, hidden_size=32, dropout=0.5)
    images, labels = flow.ones(6, 1, 8, 8), flow.arange(6)
    losses = [model(images, labels)["losses"]["cls"].item() for _ in range(2)]
    assert losses[0] != losses[1]
    model.eval()
    losses = [model(images, labels)["losses"]["cls"].item() for _ in range(2)]
    assert losses[0] == losses[1]


def test_a_size_that_three_poolings_cannot_halve_is_refused():
    with pytest.raises(
        UserError, match="image_size=30 is not a multiple of 8.*Resize the images to 32"
    ):
        AlexNet(image_size=30)
