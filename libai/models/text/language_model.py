"""What models that predict the next token share: the output layer, the loss, and what it is counted by."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai.models.blocks.outputs import token_cross_entropy


class LanguageModel(nn.Module):
    """Base of models with a `token_embedding`, an `ignore_index`, and a `head` that is None where it is tied."""

    token_embedding: nn.Embedding
    head: nn.Linear | None
    ignore_index: int

    def logits(self, features: flow.Tensor) -> flow.Tensor:
        """Scores of the next token, (batch, length, vocab_size)."""
        if self.head is not None:
            return self.head(features)
        return flow._C.matmul(features, self.token_embedding.weight, transpose_b=True)

    def outputs(self, logits: flow.Tensor, labels: flow.Tensor | None) -> dict[str, Any]:
        """The loss `lm` in nats per counted label, or without labels `{"logits": (batch, length, vocab_size)}`."""
        if labels is None:
            return {"logits": logits}
        return {"losses": {"lm": token_cross_entropy(logits, labels, self.ignore_index)}}

    def num_loss_items(self, input_ids: Any, labels: Any = None, **others: Any) -> Any:
        """How many labels the mean of the loss is over (tensors or arrays in, a scalar of the same kind out)."""
        return (labels != self.ignore_index).sum()
