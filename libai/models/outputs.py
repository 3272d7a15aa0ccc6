"""The losses and metrics that several model families share, in the form of the model contract."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow.nn import functional as F

from libai.layers.cpu import adds_up_slowly, sum_of

#: of OneFlow's cross entropy
_IGNORED = -100


def token_cross_entropy(logits: flow.Tensor, labels: flow.Tensor, ignore_index: int) -> flow.Tensor:
    """The mean cross entropy in nats over the labels that are not `ignore_index`, a 0-dim tensor.

    `logits` (batch, length, vocabulary), `labels` (batch, length) int64. A batch without any counted label gives 0 with
    zero gradients, where OneFlow's own mean gives NaN.
    """
    flat = labels.reshape(-1)
    summed, count = _sum_and_count(logits.reshape(-1, logits.shape[-1]), flat, ignore_index)
    return summed / count.clamp(min=1.0)


def _sum_and_count(logits: flow.Tensor, labels: flow.Tensor, ignored: int) -> tuple[flow.Tensor, flow.Tensor]:
    """The sum of the cross entropies (N, classes), (N,) over labels that are not `ignored`, and how many those are."""
    if adds_up_slowly(logits):
        summed = sum_of(F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none"))
    else:
        summed = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
    return summed, sum_of((labels != ignored).to(flow.float32))


def classification_outputs(logits: flow.Tensor, labels: flow.Tensor | None, training: bool) -> dict[str, Any]:
    """What a classifier's forward returns.

    `logits` (batch, classes), `labels` (batch,) int64 or None for prediction. Training: losses `cls` and metrics
    `accuracy` (a fraction). Evaluation: `logits` and, when there are labels, the losses.
    """
    if labels is None:
        return {"logits": logits}
    losses = {"cls": _mean_cross_entropy(logits, labels)}
    if not training:
        return {"logits": logits, "losses": losses}
    hits = (logits.detach().argmax(dim=1) == labels).to(flow.float32)
    accuracy = sum_of(hits) * (1.0 / hits.numel()) if adds_up_slowly(hits) else hits.mean()
    return {"losses": losses, "metrics": {"accuracy": accuracy}}


def _mean_cross_entropy(logits: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
    if not adds_up_slowly(logits):
        return F.cross_entropy(logits, labels)
    summed, count = _sum_and_count(logits, labels, _IGNORED)
    return summed / count
