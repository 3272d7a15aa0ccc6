"""A GPT that reads the bytes before each position directly, with squared ReLUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.models import GPT
from libai.models.blocks.init import init_weights, transformer_std
from libai.models.blocks.transformer import RESIDUAL_PROJECTIONS
from libai.utils.errors import UserError


class SquaredReLU(nn.Module):
    """max(x, 0)^2 (So et al. 2021)."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Element by element, of the same shape."""
        y = flow.relu(x)
        return y * y


class SpeedrunGPT(GPT):
    """`GPT` whose input is the sum of embeddings of a byte and of the `num_previous` bytes before it.

    Without them the first blocks must learn to attend to the previous positions before anything else. The bytes before
    the beginning are taken to be equal to the first one. Each block begins as the identity. Other arguments: see `GPT`.
    """

    def __init__(self, vocab_size: int, max_seq_length: int, num_previous: int = 2, **sizes: Any):
        super().__init__(vocab_size, max_seq_length, **sizes)
        hidden_size = self.token_embedding.weight.shape[1]
        self.previous = nn.ModuleList([nn.Embedding(vocab_size, hidden_size) for _ in range(num_previous)])
        for block in self.blocks:
            block.mlp.activation = SquaredReLU()
        std = transformer_std(hidden_size, len(self.blocks), RESIDUAL_PROJECTIONS)
        init_weights(self, lambda name, weight: 0.0 if name.endswith(RESIDUAL_PROJECTIONS) else std(name, weight))

    def features(
        self,
        input_ids: flow.Tensor,
        positions: flow.Tensor | None = None,
        mask: flow.Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> flow.Tensor:
        """The normalised output of the last block, (batch, length, hidden_size); not for cached generation."""
        if positions is not None or caches is not None:
            raise UserError("SpeedrunGPT has no cache: the bytes before a new one are not kept. Generate without it.")
        x = self.token_embedding(input_ids) + self.position_embedding[: input_ids.shape[1]]
        shifted = input_ids
        for table in self.previous:
            shifted = flow.cat([shifted[:, :1], shifted[:, :-1]], dim=1)
            x = x + table(shifted)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)
