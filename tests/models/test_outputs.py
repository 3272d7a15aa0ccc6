"""Losses and metrics shared by the families."""

import numpy as np
import oneflow as flow
from oneflow.nn import functional as F

from libai.models.blocks.outputs import classification_outputs, token_cross_entropy

LOGITS = np.random.RandomState(0).randn(2, 5, 7).astype(np.float32)
LABELS = np.random.RandomState(1).randint(0, 7, (2, 5))


def test_no_counted_label_gives_zero_loss_and_zero_gradient():
    logits, labels = (
        flow.tensor(LOGITS, requires_grad=True),
        flow.full((2, 5), -100, dtype=flow.int64),
    )
    loss = token_cross_entropy(logits, labels, ignore_index=-100)
    loss.backward()
    assert loss.item() == 0 and not logits.grad.numpy().any()
    # the negative control: OneFlow's own mean
    own = F.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1), ignore_index=-100)
    assert np.isnan(own.item())


def test_classifier_reports_accuracy_in_training_only():
    logits, labels = flow.tensor(LOGITS[0]), flow.tensor(LOGITS[0].argmax(1))
    assert classification_outputs(logits, labels, training=True)["metrics"]["accuracy"].item() == 1
    logits[:2] = 0.0
    assert classification_outputs(logits, labels, training=True)["metrics"]["accuracy"].item() < 1
    assert set(classification_outputs(logits, labels, training=False)) == {"logits", "losses"}
    assert set(classification_outputs(logits, None, training=True)) == {"logits"}
