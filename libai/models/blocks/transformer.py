"""The transformer block of GPT, Llama, BERT, T5 and ViT.

Query, key and value are three separate layers instead of a fused one. So tensor parallelism splits
each weight on an axis (`BLOCK_SPLIT`), and this file contains no parallel code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn import functional as F

from libai.layers import Dropout, DropPath, causal_mask, rotate, scaled_dot_product_attention
from libai.layers.attention import Rotation
from libai.utils.errors import UserError
from libai.utils.sizes import check_known, check_range, check_sizes

#: weight -> axis that tensor parallelism splits, relative to a block. Column-parallel layers split
#: the outputs, which are axis 0 of the (out, in) weights and of the biases. The row-parallel layer
#: after them splits the inputs and keeps its bias on every rank.
ATTENTION_SPLIT = {
    "attention.q.weight": 0,
    "attention.k.weight": 0,
    "attention.v.weight": 0,
    "attention.out.weight": 1,
}
ATTENTION_BIAS_SPLIT = {"attention.q.bias": 0, "attention.k.bias": 0, "attention.v.bias": 0}
MLP_SPLIT = {"mlp.up.weight": 0, "mlp.up.bias": 0, "mlp.down.weight": 1}
BLOCK_SPLIT = {**ATTENTION_SPLIT, **ATTENTION_BIAS_SPLIT, **MLP_SPLIT}

#: weights that write into the residual stream, for `transformer_std`
RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")


def plan_of_blocks(blocks: str, split: Mapping[str, int] = BLOCK_SPLIT) -> dict[str, Any]:
    """Return a plan for a model with the list of blocks `blocks`.

    The names in `split` are relative to a block.
    """
    return {
        "split": {f"{blocks}.*.{name}": axis for name, axis in split.items()},
        "blocks": blocks,
        "divisible": [f"{blocks}.*.attention.num_heads", f"{blocks}.*.attention.num_kv_heads"],
    }


def check_transformer(hidden_size: int, num_layers: int, num_heads: int, mlp_ratio: float) -> None:
    """Raise `UserError` for block sizes that are impossible for a transformer."""
    check_sizes(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads)
    check_range("0 < x < inf", mlp_ratio=mlp_ratio)
    if int(hidden_size * mlp_ratio) < 1:
        raise UserError(
            f"mlp_ratio={mlp_ratio} of hidden_size={hidden_size} gives no hidden units. Raise one "
            "of them."
        )


class Attention(nn.Module):
    """Multi-head attention, or grouped-query attention if there are fewer key heads than query
    heads.

    Args:
        hidden_size: width of the residual stream, a multiple of `num_heads` unless `head_size` is
            given.
        num_heads: number of query heads.
        causal_length: maximum sequence length of causal attention, in which position i attends only
            to positions up to i. None leaves the choice of visible positions to the caller's
            `mask`.
        num_kv_heads: number of key and value heads, each shared by `num_heads / num_kv_heads` query
            heads (Ainslie et al. 2023). Default: `num_heads`.
        head_size: width of a head (default: `hidden_size / num_heads`).
        qkv_bias, out_bias: whether the input projections and the output projection have a bias.
        scale: factor of the scores (default: `1 / sqrt(head_size)`).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        causal_length: int | None = None,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        scale: float | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if head_size is None and hidden_size % num_heads:
            raise UserError(
                f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}, so the "
                "heads cannot have equal width. Nearest hidden_size: "
                f"{hidden_size // num_heads * num_heads or num_heads} or "
                f"{(hidden_size // num_heads + 1) * num_heads}."
            )
        if num_heads % num_kv_heads:
            raise UserError(
                f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}, so the "
                "key heads cannot be shared evenly. num_kv_heads can be one of "
                f"{[n for n in range(1, num_heads + 1) if num_heads % n == 0]}."
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = hidden_size // num_heads if head_size is None else head_size
        check_sizes(head_size=self.head_size)
        inner, kv_inner = num_heads * self.head_size, num_kv_heads * self.head_size
        self.q = nn.Linear(hidden_size, inner, bias=qkv_bias)
        self.k = nn.Linear(hidden_size, kv_inner, bias=qkv_bias)
        self.v = nn.Linear(hidden_size, kv_inner, bias=qkv_bias)
        self.out = nn.Linear(inner, hidden_size, bias=out_bias)
        self.scale = scale
        self.is_causal = causal_length is not None
        if causal_length is not None:
            # The mask is a buffer of each block, not a source operation in forward, so it moves
            # with its block to any mesh and stage.
            self.register_buffer("causal_mask", causal_mask(causal_length), persistent=False)

    def forward(
        self,
        x: flow.Tensor,
        mask: flow.Tensor | None = None,
        rotation: Rotation | None = None,
        cache: Any = None,
        context: Any = None,
    ) -> flow.Tensor:
        """Apply attention to `x` (batch, length, hidden_size). The output has the same shape.

        Args:
            mask: added to the scores, (…, length, number of keys).
            rotation: rotary positions for `rotate`, applied to queries and keys.
            cache: object with a method `append(k, v)`, each (batch, key heads, length, head size),
                which returns the keys and values to attend to. `mask` must then define all visible
                positions, including the causal order.
            context: sequence to attend to instead of `x`, (batch, length, hidden_size), or its
                `keys_values`.
        """
        length = x.shape[1]
        if self.is_causal and cache is None:
            causal = self.causal_mask
            if length != causal.shape[0]:
                causal = causal[:length, :length]
            mask = causal if mask is None else mask + causal
        q = self._split_heads(self.q(x))
        k, v = (
            context
            if isinstance(context, tuple)
            else self.keys_values(x if context is None else context)
        )
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        heads = scaled_dot_product_attention(q, k, v, mask, self.scale)
        return self.out(heads.transpose(1, 2).reshape(x.shape[0], length, -1))

    def keys_values(self, x: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        """Return the keys and values of `x`, each (batch, key heads, length, head size)."""
        return self._split_heads(self.k(x)), self._split_heads(self.v(x))

    def _split_heads(self, x: flow.Tensor) -> flow.Tensor:
        """Convert (…, length, width) to (…, heads, length, head size)."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_size, self.head_size).transpose(
            -3, -2
        )


class GELUTanh(nn.Module):
    """The tanh approximation of GELU, which GPT-2 was trained with (Hendrycks & Gimpel 2016)."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Apply the activation to each element. The shape does not change."""
        return flow._C.fast_gelu(x)


#: name -> activation module of the inner units of `MLPBlock`
ACTIVATIONS = {"gelu": nn.GELU, "gelu_tanh": GELUTanh, "relu": nn.ReLU, "silu": nn.SiLU}


def activation_module(name: str) -> nn.Module:
    """Return a new module of `ACTIVATIONS` by name. Raises `UserError` for an unknown name."""
    check_known("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]()


class MLPBlock(nn.Module):
    """The position-wise two-layer network of a block, with `inner_size` hidden units."""

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str = "gelu", bias: bool = True
    ):
        super().__init__()
        self.up = nn.Linear(hidden_size, inner_size, bias=bias)
        self.activation = activation_module(activation)
        self.down = nn.Linear(inner_size, hidden_size, bias=bias)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Apply the network to `x` (…, hidden_size). The shape does not change."""
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    """The network `down(activation(gate(x)) * up(x))`, with `inner_size` hidden units (SwiGLU etc.,
    Shazeer 2020).
    """

    def __init__(
        self, hidden_size: int, inner_size: int, bias: bool = False, activation: str = "silu"
    ):
        super().__init__()
        self.activation = activation_module(activation)
        self.gate = nn.Linear(hidden_size, inner_size, bias=bias)
        self.up = nn.Linear(hidden_size, inner_size, bias=bias)
        self.down = nn.Linear(inner_size, hidden_size, bias=bias)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Apply the network to `x` (…, hidden_size). The shape does not change."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`, with dropout on both
    branches.

    Args:
        attention, mlp: modules of the two branches.
        norm: function that builds a norm for one branch.
        dropout: dropout probability of the elements of each branch.
        drop_path: probability that a sample skips a branch entirely (stochastic depth).
        is_post_norm: use `norm(x + attention(x))` and `norm(x + mlp(x))` instead (Vaswani et al.
            2017).
        cross_attention: adds `x + cross_attention(norm(x))` between the two branches, to attend to
            a context. Not supported with `is_post_norm`.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        drop_path: float = 0.0,
        is_post_norm: bool = False,
        cross_attention: Attention | None = None,
    ):
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.attention_dropout = Dropout(dropout)
        self.mlp_norm = norm()
        self.mlp = mlp
        self.mlp_dropout = Dropout(dropout)
        self.attention_drop_path = DropPath(drop_path)
        self.mlp_drop_path = DropPath(drop_path)
        self.is_post_norm = is_post_norm
        self.cross_attention = cross_attention
        if cross_attention is not None:
            self.cross_attention_norm = norm()
            self.cross_attention_dropout = Dropout(dropout)

    def forward(
        self,
        x: flow.Tensor,
        mask: flow.Tensor | None = None,
        rotation: Rotation | None = None,
        cache: Any = None,
        context: Any = None,
        context_mask: flow.Tensor | None = None,
    ) -> flow.Tensor:
        """Apply the block to `x` (batch, length, hidden_size). The shape does not change.

        `context` and its additive `context_mask` go to the cross-attention. The other arguments are
        the same as in `Attention`.
        """
        read = x if self.is_post_norm else self.attention_norm(x)
        branch = self.attention(read, mask, rotation, cache)
        x = x + self.attention_drop_path(self.attention_dropout(branch))
        x = self.attention_norm(x) if self.is_post_norm else x
        if self.cross_attention is not None:
            branch = self.cross_attention(
                self.cross_attention_norm(x), context_mask, context=context
            )
            x = x + self.cross_attention_dropout(branch)
        branch = self.mlp(x if self.is_post_norm else self.mlp_norm(x))
        x = x + self.mlp_drop_path(self.mlp_dropout(branch))
        return self.mlp_norm(x) if self.is_post_norm else x


class ResPostNormBlock(Block):
    """A block with a norm after each branch: `x + norm(attention(x))`, then `x + norm(mlp(x))` (Liu
    et al. 2022).
    """

    def forward(self, x: flow.Tensor, *args: Any, **kwargs: Any) -> flow.Tensor:
        """Apply the block like `Block`, without cross-attention."""
        branch = self.attention_norm(self.attention_dropout(self.attention(x, *args, **kwargs)))
        x = x + self.attention_drop_path(branch)
        return x + self.mlp_drop_path(self.mlp_norm(self.mlp_dropout(self.mlp(x))))


def layer_norm_blocks(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    causal_length: int | None = None,
    activation: str = "gelu",
    norm_eps: float = 1e-5,
    is_post_norm: bool = False,
) -> nn.ModuleList:
    """Return the blocks of GPT-2, BERT and ViT, with layer norms and biases in all layers.

    The MLP has `hidden_size * mlp_ratio` hidden units. `drop_path` is the probability of the last
    block.
    """
    blocks = [
        Block(
            Attention(hidden_size, num_heads, causal_length),
            MLPBlock(hidden_size, int(hidden_size * mlp_ratio), activation),
            partial(nn.LayerNorm, hidden_size, eps=norm_eps),
            dropout,
            rate,
            is_post_norm,
        )
        for rate in linear_rates(drop_path, num_layers)
    ]
    return nn.ModuleList(blocks)


def linear_rates(last: float, count: int) -> list[float]:
    """Return `count` probabilities that increase linearly from 0 to `last`, for stochastic
    depth.
    """
    return [last * i / max(1, count - 1) for i in range(count)]


def embed_tokens(
    input_ids: flow.Tensor,
    tokens: nn.Embedding,
    table: flow.Tensor,
    positions: flow.Tensor | None = None,
) -> flow.Tensor:
    """Return the token embeddings plus the learned positions, (batch, length, hidden_size).

    `input_ids` (batch, length) int64; `table` of positions (maximum length, hidden_size);
    `positions` (batch, length) int64 if they are not 0, 1, 2, ….
    """
    length, max_length = input_ids.shape[1], table.shape[0]
    check_length(length, max_length)
    if positions is not None:
        return tokens(input_ids) + F.embedding(positions, table)
    return tokens(input_ids) + (table if length == max_length else table[:length])


def check_length(length: int, max_length: int) -> None:
    """Raise `UserError` if a sequence has more tokens than the model has positions."""
    if length > max_length:
        raise UserError(
            f"the batch contains sequences of {length} tokens, but the model has {max_length} "
            f"positions (max_seq_length). Cut the sequences to {max_length}, or set "
            f"max_seq_length={length}."
        )


def padding_mask(attention_mask: flow.Tensor) -> flow.Tensor:
    """Convert `attention_mask` (batch, length), 0 on padding, to an additive mask (batch, 1, 1,
    length).
    """
    return ((attention_mask.to(flow.float32) - 1.0) * 1e9).reshape(
        attention_mask.shape[0], 1, 1, -1
    )
