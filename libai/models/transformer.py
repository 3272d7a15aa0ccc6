"""The pre-norm transformer block that GPT, BERT and ViT are made of.

Query, key and value are three layers and not one fused one: so tensor parallelism is a split of each weight on an axis
(`BLOCK_SPLIT`), and nothing in this file knows about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers import Dropout, DropPath, causal_mask, scaled_dot_product_attention
from libai.utils.errors import UserError
from libai.utils.sizes import check_rate, check_sizes

#: weight -> axis that tensor parallelism splits, relative to a block. Column-parallel layers split the outputs (axis 0
#: of an (out, in) weight and of its bias), the row-parallel layer behind them the inputs, and keeps its bias whole.
BLOCK_SPLIT = {
    "attention.q.weight": 0,
    "attention.q.bias": 0,
    "attention.k.weight": 0,
    "attention.k.bias": 0,
    "attention.v.weight": 0,
    "attention.v.bias": 0,
    "attention.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
}

#: the weights that write into the residual stream, for `transformer_std`
RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")


def plan_of_blocks(blocks: str) -> dict[str, Any]:
    """A plan for a model whose list of blocks is the attribute `blocks`."""
    return {
        "split": {f"{blocks}.*.{name}": axis for name, axis in BLOCK_SPLIT.items()},
        "blocks": blocks,
        "divisible": [f"{blocks}.*.attention.num_heads"],
    }


def check_transformer(hidden_size: int, num_layers: int, num_heads: int, mlp_ratio: float) -> None:
    """Raise `UserError` for sizes of blocks that no transformer can have."""
    check_sizes(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads)
    check_rate(mlp_ratio=mlp_ratio)
    if int(hidden_size * mlp_ratio) < 1:
        raise UserError(f"mlp_ratio={mlp_ratio} of hidden_size={hidden_size} leaves no unit. Raise one of them.")


class Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        hidden_size: width of the residual stream, a multiple of `num_heads`.
        causal_length: with a number, position i sees positions up to i only, in sequences up to this length.
    """

    def __init__(self, hidden_size: int, num_heads: int, causal_length: int | None = None):
        super().__init__()
        check_sizes(hidden_size=hidden_size, num_heads=num_heads)
        if hidden_size % num_heads:
            raise UserError(
                f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}, so heads cannot have equal "
                f"width. Nearest hidden_size: {hidden_size // num_heads * num_heads or num_heads} or "
                f"{(hidden_size // num_heads + 1) * num_heads}."
            )
        self.num_heads = num_heads
        self.q = nn.Linear(hidden_size, hidden_size)
        self.k = nn.Linear(hidden_size, hidden_size)
        self.v = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.is_causal = causal_length is not None
        if causal_length is not None:
            # A buffer of each block and not a source operation in forward: it follows its block to any mesh and stage.
            self.register_buffer("causal_mask", causal_mask(causal_length), persistent=False)

    def forward(self, x: flow.Tensor, mask: flow.Tensor | None = None) -> flow.Tensor:
        """`x` (batch, length, hidden_size) to the same shape; `mask` is added to the scores (…, length, length)."""
        length = x.shape[1]
        if self.is_causal:
            causal = self.causal_mask
            if length != causal.shape[0]:
                causal = causal[:length, :length]
            mask = causal if mask is None else mask + causal
        q, k, v = (self._split_heads(layer(x)) for layer in (self.q, self.k, self.v))
        heads = scaled_dot_product_attention(q, k, v, mask)
        return self.out(heads.transpose(1, 2).reshape(*x.shape))

    def _split_heads(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, length, width) to (batch, heads, length, head width)."""
        batch, length, width = x.shape
        return x.reshape(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)


class MLPBlock(nn.Module):
    """The position-wise two-layer network of a block; `hidden_size * mlp_ratio` units in between."""

    def __init__(self, hidden_size: int, mlp_ratio: float):
        super().__init__()
        inner = int(hidden_size * mlp_ratio)
        self.up = nn.Linear(hidden_size, inner)
        self.activation = nn.GELU()
        self.down = nn.Linear(inner, hidden_size)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """`x` (…, hidden_size) to the same shape."""
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, with dropout on both branches.

    Args:
        causal_length: see `Attention`.
        dropout: rate on the elements of each branch.
        drop_path: rate at which a sample skips a branch altogether (stochastic depth).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        causal_length: int | None = None,
    ):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, causal_length)
        self.attention_dropout = Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = MLPBlock(hidden_size, mlp_ratio)
        self.mlp_dropout = Dropout(dropout)
        self.attention_drop_path = DropPath(drop_path)
        self.mlp_drop_path = DropPath(drop_path)

    def forward(self, x: flow.Tensor, mask: flow.Tensor | None = None) -> flow.Tensor:
        """`x` (batch, length, hidden_size) to the same shape; `mask` as in `Attention`."""
        x = x + self.attention_drop_path(self.attention_dropout(self.attention(self.attention_norm(x), mask)))
        return x + self.mlp_drop_path(self.mlp_dropout(self.mlp(self.mlp_norm(x))))


def transformer_flops(multiplied: Iterable[nn.Module], num_layers: int, hidden_size: int, length: int) -> int:
    """Forward and backward FLOPs of one sample: 6 per weight and position, plus the two products of attention.

    `multiplied`: the modules whose matrices meet every position (a table that is only looked up is not among them).
    """
    weights = sum(p.numel() for module in multiplied for p in module.parameters() if p.ndim >= 2)
    return length * (6 * weights + 12 * num_layers * hidden_size * length)


def embed_tokens(input_ids: flow.Tensor, tokens: nn.Embedding, positions: flow.Tensor) -> flow.Tensor:
    """The token embeddings plus the learned positions, (batch, length, hidden_size).

    `input_ids` (batch, length) int64, `positions` (longest length, hidden_size).
    """
    length, max_length = input_ids.shape[1], positions.shape[0]
    if length > max_length:
        raise UserError(
            f"the batch holds sequences of {length} tokens, but the model has {max_length} learned positions "
            f"(max_seq_length). Cut the sequences to {max_length}, or set max_seq_length={length}."
        )
    return tokens(input_ids) + (positions if length == max_length else positions[:length])
