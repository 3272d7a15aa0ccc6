"""Outputs, losses and metrics shared by several model families, in the form of the model
contract.
"""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn import functional as F


def token_cross_entropy(logits: flow.Tensor, labels: flow.Tensor, ignore_index: int) -> flow.Tensor:
    """Return the mean cross entropy in nats over the labels that are not `ignore_index`, a 0-dim
    tensor.

    `logits` (batch, length, vocabulary), `labels` (batch, length) int64. A batch without counted
    labels gives 0 with zero gradients, whereas OneFlow's own mean gives NaN.
    """
    flat = labels.reshape(-1)
    summed = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), flat, ignore_index=ignore_index, reduction="sum"
    )
    return summed / (flat != ignore_index).to(flow.float32).sum().clamp(min=1.0)


def classification_outputs(
    logits: flow.Tensor, labels: flow.Tensor | None, training: bool
) -> dict[str, Any]:
    """Return the outputs of a classifier's forward.

    `logits` (batch, classes); `labels` (batch,) int64, or None for prediction. In training mode,
    returns the losses `cls` and the metrics `accuracy` (a fraction). In eval mode, returns `logits`
    and, if there are labels, the losses.
    """
    if labels is None:
        return {"logits": logits}
    losses = {"cls": F.cross_entropy(logits, labels)}
    if not training:
        return {"logits": logits, "losses": losses}
    hits = (logits.detach().argmax(dim=1) == labels).to(flow.float32)
    return {"losses": losses, "metrics": {"accuracy": hits.mean()}}


class LanguageModel(nn.Module):
    """Base of models with a `token_embedding`, an `ignore_index`, and a `head`, which is None if it
    is tied.
    """

    token_embedding: nn.Embedding
    head: nn.Linear | None
    ignore_index: int

    def logits(self, features: flow.Tensor) -> flow.Tensor:
        """Return the scores of the next token, (batch, length, vocab_size)."""
        if self.head is not None:
            return self.head(features)
        return flow._C.matmul(features, self.token_embedding.weight, transpose_b=True)

    def outputs(self, logits: flow.Tensor, labels: flow.Tensor | None) -> dict[str, Any]:
        """Return the loss `lm` in nats per counted label.

        Without labels, returns `{"logits": (batch, length, vocab_size)}`.
        """
        if labels is None:
            return {"logits": logits}
        return {"losses": {"lm": token_cross_entropy(logits, labels, self.ignore_index)}}

    def num_loss_items(self, input_ids: Any, labels: Any = None, **others: Any) -> Any:
        """Return the number of labels that the loss averages over.

        Takes tensors or arrays, and returns a scalar of the same kind.
        """
        return (labels != self.ignore_index).sum()
