"""A classifier of texts: a pretrained sentence encoder and one linear layer."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai.models.blocks.outputs import classification_outputs


class TextClassifier(nn.Module):
    """`encoder` gives a sentence embedding of length 1, which the head tells classes by.

    Args:
        encoder: a module like `libai.models.BERTEmbedder`.
        hidden_size: of its embeddings.
        num_classes: of the labels.
        scale: of the embeddings; numbers of size 1 make a new head learn as fast as the encoder.
    """

    def __init__(self, encoder: nn.Module, hidden_size: int, num_classes: int, scale: float):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(hidden_size, num_classes)
        self.scale = scale
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, input_ids: flow.Tensor, attention_mask: flow.Tensor, labels: flow.Tensor | None = None
    ) -> dict[str, Any]:
        """`input_ids`, `attention_mask` (batch, length) int64, `labels` (batch,) int64."""
        embeddings = self.encoder(input_ids, attention_mask)["embeddings"]
        return classification_outputs(self.head(embeddings * self.scale), labels, self.training)
