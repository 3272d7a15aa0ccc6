"""The losses and metrics that several model families share, in the form of the model contract."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow.nn import functional as F


def token_cross_entropy(logits: flow.Tensor, labels: flow.Tensor, ignore_index: int) -> flow.Tensor:
    """The mean cross entropy in nats over the labels that are not `ignore_index`, a 0-dim tensor.

    `logits` (batch, length, vocabulary), `labels` (batch, length) int64. A batch without any counted label gives 0 with
    zero gradients, where OneFlow's own mean gives NaN.
    """
    flat = labels.reshape(-1)
    summed = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, ignore_index=ignore_index, reduction="sum")
    return summed / (flat != ignore_index).to(flow.float32).sum().clamp(min=1.0)


def classification_outputs(logits: flow.Tensor, labels: flow.Tensor | None, training: bool) -> dict[str, Any]:
    """What a classifier's forward returns.

    `logits` (batch, classes), `labels` (batch,) int64, or None for prediction. Training: losses `cls` and metrics
    `accuracy` (a fraction). Evaluation: `logits` and, when there are labels, the losses.
    """
    if labels is None:
        return {"logits": logits}
    losses = {"cls": F.cross_entropy(logits, labels)}
    if not training:
        return {"logits": logits, "losses": losses}
    hits = (logits.detach().argmax(dim=1) == labels).to(flow.float32)
    return {"losses": losses, "metrics": {"accuracy": hits.mean()}}
