"""GPT: a decoder-only language model with learned positions and a head tied to the token embedding,
like GPT-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers import Dropout
from libai.models.blocks.init import init_weights, transformer_std
from libai.models.blocks.outputs import LanguageModel
from libai.models.blocks.transformer import (
    RESIDUAL_PROJECTIONS,
    check_transformer,
    embed_tokens,
    layer_norm_blocks,
    plan_of_blocks,
)
from libai.utils.sizes import check_sizes


class GPT(LanguageModel):
    """A causal language model over token ids.

    Args:
        vocab_size: number of token ids.
        max_seq_length: maximum sequence length, which is the number of learned positions.
        hidden_size, num_layers, num_heads, mlp_ratio: size of the blocks.
        dropout: dropout probability on the embeddings and on both branches of each block.
        activation: activation of the hidden units: "gelu", or the approximation "gelu_tanh", which
            GPT-2 was trained with.
        tie_head: use the token embedding as the output layer, as one shared parameter.
        ignore_index: label of positions that are not counted.
        norm_eps: added to the variance in every norm.
    """

    #: parallel layout of the model for a mesh, see `libai.parallel.ParallelPlan`
    plan = plan_of_blocks("blocks")

    def __init__(
        self,
        vocab_size: int,
        max_seq_length: int,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        activation: str = "gelu",
        tie_head: bool = True,
        ignore_index: int = -100,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, max_seq_length=max_seq_length)
        check_transformer(hidden_size, num_layers, num_heads, mlp_ratio)
        self.ignore_index = ignore_index
        self.max_seq_length = max_seq_length
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Parameter(flow.zeros(max_seq_length, hidden_size))
        self.embedding_dropout = Dropout(dropout)
        self.blocks = layer_norm_blocks(
            num_layers,
            hidden_size,
            num_heads,
            mlp_ratio,
            dropout,
            causal_length=max_seq_length,
            activation=activation,
            norm_eps=norm_eps,
        )
        self.norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.head = None if tie_head else nn.Linear(hidden_size, vocab_size, bias=False)
        init_weights(self, transformer_std(hidden_size, num_layers, RESIDUAL_PROJECTIONS))

    def forward(self, input_ids: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """Run the model on `input_ids` and `labels`, (batch, length) int64.

        `labels[:, i]` is the token after `input_ids[:, i]`.

        Returns the loss `lm` in nats per counted label, or `{"logits": (batch, length,
        vocab_size)}` without labels.
        """
        return self.outputs(self.logits(self.features(input_ids)), labels)

    def features(
        self,
        input_ids: flow.Tensor,
        positions: flow.Tensor | None = None,
        mask: flow.Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> flow.Tensor:
        """Return the normalized output of the last block, (batch, length, hidden_size).

        Generation also passes the `positions` (batch, length) int64 of the tokens, a `mask`, and
        one cache per block, as described in `libai.models.blocks.transformer.Attention`.
        """
        x = embed_tokens(input_ids, self.token_embedding, self.position_embedding, positions)
        x = self.embedding_dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, cache=None if caches is None else caches[i])
        return self.norm(x)
