"""A GPT whose input includes the bytes before each position, with squared ReLUs."""

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
    """The activation max(x, 0)^2 (So et al. 2021)."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Apply the activation to each element of `x`."""
        y = flow.relu(x)
        return y * y


class SpeedrunGPT(GPT):
    """A `GPT` whose input is the sum of the embeddings of a byte and of the `num_previous` bytes
    before it.

    Without the previous bytes, the first blocks must first learn to attend to the previous
    positions. Positions before the beginning of a window count as copies of its first byte.
    Initially, each block is the identity. For the other arguments see `GPT`.
    """

    def __init__(self, vocab_size: int, max_seq_length: int, num_previous: int = 2, **sizes: Any):
        super().__init__(vocab_size, max_seq_length, **sizes)
        hidden_size = self.token_embedding.weight.shape[1]
        self.previous = nn.ModuleList(
            [nn.Embedding(vocab_size, hidden_size) for _ in range(num_previous)]
        )
        for block in self.blocks:
            block.mlp.activation = SquaredReLU()
        std = transformer_std(hidden_size, len(self.blocks), RESIDUAL_PROJECTIONS)
        init_weights(
            self,
            lambda name, weight: 0.0 if name.endswith(RESIDUAL_PROJECTIONS) else std(name, weight),
        )

    def features(
        self,
        input_ids: flow.Tensor,
        positions: flow.Tensor | None = None,
        mask: flow.Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> flow.Tensor:
        """Return the normalized output of the last block, (batch, length, hidden_size).

        Raises `UserError` in cached generation.
        """
        if positions is not None or caches is not None:
            raise UserError(
                "SpeedrunGPT has no cache for the bytes before a new one. Generate without a cache."
            )
        x = self.token_embedding(input_ids) + self.position_embedding[: input_ids.shape[1]]
        shifted = input_ids
        for table in self.previous:
            shifted = flow.cat([shifted[:, :1], shifted[:, :-1]], dim=1)
            x = x + table(shifted)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)
