"""SimCSE (Gao et al. 2021): sentence embeddings from a contrastive loss over the batch, and a
retrieval evaluator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.evaluation import Evaluator
from libai.models import BERTEmbedder


class SimCSE(nn.Module):
    """Pull the embeddings of a text's two views together and push the embeddings of other texts
    away.

    Args:
        temperature: temperature of the softmax over the cosines.
        encoder: arguments of `BERTEmbedder`. With `dropout`, equal views get different embeddings.
    """

    def __init__(self, temperature: float = 0.05, **encoder: Any):
        super().__init__()
        self.temperature = temperature
        self.encoder = BERTEmbedder(**encoder)

    def forward(self, input_ids: flow.Tensor, attention_mask: flow.Tensor) -> dict[str, Any]:
        """Return the losses and, in evaluation, `embeddings` (batch, 2, hidden size).

        `input_ids` and `attention_mask` are (batch, 2, length) int64: two views of each text. The
        loss `contrastive` is the cross entropy of finding a text's second view, given its first.
        """
        batch, views, length = input_ids.shape
        rows = self.encoder(input_ids.reshape(-1, length), attention_mask.reshape(-1, length))[
            "embeddings"
        ]
        pairs = rows.reshape(batch, views, -1)
        first, second = pairs[:, 0], pairs[:, 1]
        scores = flow.matmul(first, second.transpose(0, 1)) / self.temperature
        right = (first * second).sum(dim=1) / self.temperature
        # subtract the largest possible score, 1 / temperature, so that no exponential overflows
        others = (
            flow.log(flow.exp(scores - 1.0 / self.temperature).sum(dim=1)) + 1.0 / self.temperature
        )
        losses = {"contrastive": (others - right).mean()}
        return {"losses": losses} if self.training else {"losses": losses, "embeddings": pairs}


class RetrievalEvaluator(Evaluator):
    """Compute `recall`, the fraction of texts whose first view is nearest to its own second view
    among all texts.
    """

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the embeddings themselves, because the nearest one is known only when all batches
        are done.
        """
        return {"embeddings": [np.asarray(outputs["embeddings"].numpy())]}

    def compute(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Return the metric, computed from the embeddings of all texts."""
        pairs = np.concatenate(sums["embeddings"])
        nearest = (pairs[:, 0] @ pairs[:, 1].T).argmax(axis=1)
        return {"recall": float((nearest == np.arange(len(pairs))).mean())}
