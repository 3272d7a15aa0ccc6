"""A text classifier: a pretrained sentence encoder and one linear layer."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai.models.blocks.outputs import classification_outputs


class TextClassifier(nn.Module):
    """Classify texts by a linear head on the sentence embeddings of `encoder`, which have norm 1.

    Args: encoder: a module like `libai.models.BERTEmbedder`. hidden_size: size of the embeddings.
        num_classes: number of labels. scale: factor for the embeddings. If their elements are about
        1, a new head learns as fast as the encoder.
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
        """Classify texts: `input_ids` and `attention_mask` (batch, length) int64, `labels` (batch,)
        int64.
        """
        embeddings = self.encoder(input_ids, attention_mask)["embeddings"]
        return classification_outputs(self.head(embeddings * self.scale), labels, self.training)
