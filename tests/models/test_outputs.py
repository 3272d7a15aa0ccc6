"""Losses and metrics shared by the families."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from oneflow.nn import functional as F

from libai.models.blocks.outputs import classification_outputs, token_cross_entropy

LOGITS = np.random.RandomState(0).randn(2, 5, 7).astype(np.float32)
LABELS = np.random.RandomState(1).randint(0, 7, (2, 5))


def test_token_cross_entropy_skips_ignored_labels() -> None:
    labels = LABELS.copy()
    labels[0, 1:] = -1
    kept = labels.ravel() != -1
    rows = LOGITS.reshape(-1, 7).astype(np.float64)[kept]
    expected = np.mean(np.log(np.exp(rows).sum(1)) - rows[np.arange(len(rows)), labels.ravel()[kept]])
    loss = token_cross_entropy(flow.tensor(LOGITS), flow.tensor(labels), ignore_index=-1)
    assert loss.ndim == 0 and loss.item() == pytest.approx(expected, rel=1e-6)


def test_no_counted_label_gives_zero_loss_and_zero_gradient() -> None:
    logits, labels = flow.tensor(LOGITS, requires_grad=True), flow.full((2, 5), -100, dtype=flow.int64)
    loss = token_cross_entropy(logits, labels, ignore_index=-100)
    loss.backward()
    assert loss.item() == 0 and not logits.grad.numpy().any()
    # the negative control: OneFlow's own mean
    own = F.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1), ignore_index=-100)
    assert np.isnan(own.item())


def test_classifier_reports_accuracy_in_training_only() -> None:
    logits, labels = flow.tensor(LOGITS[0]), flow.tensor(LOGITS[0].argmax(1))
    wrong = flow.tensor(np.where(np.arange(5) < 2, (LOGITS[0].argmax(1) + 1) % 7, LOGITS[0].argmax(1)))
    assert classification_outputs(logits, labels, training=True)["metrics"]["accuracy"].item() == 1
    assert classification_outputs(logits, wrong, training=True)["metrics"]["accuracy"].item() == pytest.approx(0.6)
    assert set(classification_outputs(logits, labels, training=False)) == {"logits", "losses"}
    assert set(classification_outputs(logits, None, training=True)) == {"logits"}
