"""The README is correct: both modes give the same curve, and dropout is active only in training."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from alexnet import AlexNet  # noqa: E402

from libai.config import load_config  # noqa: E402
from libai.engine import Run  # noqa: E402
from libai.engine.hooks import CallbackHook  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402


def train(folder: Path, is_graph: bool) -> list[float]:
    words = ["train.train_iter=30", "train.log_period=1", "train.evaluation.enabled=false"]
    words += [f"train.output_dir={folder}", f"graph.enabled={is_graph}"]
    run = Run(load_config(PROJECT / "alexnet_digits.py", words))
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
