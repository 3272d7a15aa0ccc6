"""The README is correct: both modes give the same curve, and the default model is ConvNeXt-T."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from project_runs import train_in_both_modes

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from convnext import ConvNeXt  # noqa: E402

from libai.models.blocks.init import without_initial_values  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402


@pytest.mark.e2e
def test_both_modes_give_one_curve(tmp_path):
    settings = ("train.train_iter=30", "train.evaluation.enabled=false")
    losses = train_in_both_modes(PROJECT / "convnext_digits.py", tmp_path, *settings)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_the_default_has_the_published_size():
    with without_initial_values():
        model = ConvNeXt(num_classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 28_589_128


def test_impossible_sizes_are_refused():
    with pytest.raises(UserError, match="image_size / patch_size=6 must be a multiple of 8"):
        ConvNeXt(24, 4)
    with without_initial_values():
        model = ConvNeXt(32)
    with pytest.raises(UserError, match="images of 8 x 8.*image_size=32"):
        model(flow.ones(1, 3, 8, 8))
