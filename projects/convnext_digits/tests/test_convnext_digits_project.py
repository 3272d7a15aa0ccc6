"""The README is correct: both modes give the same curve, and the default model is ConvNeXt-T."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from convnext import ConvNeXt  # noqa: E402

from libai.config import load_config  # noqa: E402
from libai.engine import Run  # noqa: E402
from libai.engine.hooks import CallbackHook  # noqa: E402
from libai.models.blocks.init import without_initial_values  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402


def train(folder: Path, is_graph: bool) -> list[float]:
    words = ["train.train_iter=30", "train.log_period=1", "train.evaluation.enabled=false"]
    words += [f"train.output_dir={folder}", f"graph.enabled={is_graph}"]
    run = Run(load_config(PROJECT / "convnext_digits.py", words))
    losses: list[float] = []
    hook = CallbackHook(
        after_step=lambda trainer: losses.append(trainer.fetch_metrics()["train/loss"])
    )
    run.trainer.register_hooks([hook])
    run.train()
    return losses


def test_both_modes_give_one_curve(tmp_path):
    eager = train(tmp_path / "eager", False)
    graph = train(tmp_path / "graph", True)
    np.testing.assert_allclose(graph, eager, rtol=1e-5)
    assert np.mean(eager[-5:]) < np.mean(eager[:5])


def test_the_default_has_the_published_size():
    with without_initial_values():
        model = ConvNeXt(num_classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 28_589_128


def test_impossible_sizes_are_refused():
    with pytest.raises(UserError, match="image_size / patch_size=6 must be a multiple of 8"):
        ConvNeXt(24, 4)
    with pytest.raises(UserError, match="images of 8 x 8.*image_size=32"):
        ConvNeXt(32)(flow.ones(1, 3, 8, 8))
