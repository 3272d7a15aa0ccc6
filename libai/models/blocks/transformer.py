"""The transformer block that GPT, Llama, BERT, T5 and ViT are made of.

Query, key and value are three layers and not one fused one: so tensor parallelism is a split of each weight on an axis
(`BLOCK_SPLIT`), and nothing in this file knows about it.
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
from libai.utils.sizes import check_rate, check_sizes

#: weight -> axis that tensor parallelism splits, relative to a block. Column-parallel layers split the outputs (axis 0
#: of (out, in) weights and of biases), the row-parallel layer after them the inputs, and keeps its bias on every
#: rank.
ATTENTION_SPLIT = {
    "attention.q.weight": 0,
    "attention.k.weight": 0,
    "attention.v.weight": 0,
    "attention.out.weight": 1,
}
ATTENTION_BIAS_SPLIT = {"attention.q.bias": 0, "attention.k.bias": 0, "attention.v.bias": 0}
MLP_SPLIT = {"mlp.up.weight": 0, "mlp.up.bias": 0, "mlp.down.weight": 1}
BLOCK_SPLIT = {**ATTENTION_SPLIT, **ATTENTION_BIAS_SPLIT, **MLP_SPLIT}

#: the weights that write into the residual stream, for `transformer_std`
RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")


def plan_of_blocks(blocks: str, split: Mapping[str, int] = BLOCK_SPLIT) -> dict[str, Any]:
    """A plan for a model whose list of blocks is the attribute `blocks`; `split` is relative to a block."""
    return {
        "split": {f"{blocks}.*.{name}": axis for name, axis in split.items()},
        "blocks": blocks,
        "divisible": [f"{blocks}.*.attention.num_heads", f"{blocks}.*.attention.num_kv_heads"],
    }


def check_transformer(hidden_size: int, num_layers: int, num_heads: int, mlp_ratio: float) -> None:
    """Raise `UserError` for sizes of blocks that no transformer can have."""
    check_sizes(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads)
    check_rate(mlp_ratio=mlp_ratio)
    if int(hidden_size * mlp_ratio) < 1:
        raise UserError(f"mlp_ratio={mlp_ratio} of hidden_size={hidden_size} leaves no unit. Raise one of them.")


class Attention(nn.Module):
    """Multi-head attention, of grouped queries where there are fewer heads of keys than of queries.

    Args:
        hidden_size: width of the residual stream, a multiple of `num_heads` unless `head_size` is given.
        causal_length: with a number, position i sees positions up to i only, in sequences up to this length. Without,
            the caller's `mask` says what is seen.
        num_kv_heads: heads of keys and values, each shared by `num_heads / num_kv_heads` heads of queries; default: as
            many as there are heads (Ainslie et al. 2023).
        head_size: width of a head; default: `hidden_size / num_heads`.
        qkv_bias, out_bias: whether the projections into the heads, and the one out of them, have a bias.
        scale: of the scores; default: `1 / sqrt(head_size)`.
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
                f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}, so heads cannot have equal "
                f"width. Nearest hidden_size: {hidden_size // num_heads * num_heads or num_heads} or "
                f"{(hidden_size // num_heads + 1) * num_heads}."
            )
        if num_heads % num_kv_heads:
            raise UserError(
                f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}, so heads of keys cannot be "
                "shared evenly. num_kv_heads can be one of "
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
            # A buffer of each block and not a source operation in forward: it follows its block to any mesh and stage.
            self.register_buffer("causal_mask", causal_mask(causal_length), persistent=False)

    def forward(
        self,
        x: flow.Tensor,
        mask: flow.Tensor | None = None,
        rotation: Rotation | None = None,
        cache: Any = None,
        context: Any = None,
    ) -> flow.Tensor:
        """`x` (batch, length, hidden_size) to the same shape.

        Args:
            mask: added to the scores, (…, length, length of the keys).
            rotation: what `rotate` turns queries and keys by.
            cache: its `append(k, v)`, each (batch, key heads, length, head size), returns the keys and values to attend
                to. `mask` then says all of what is seen, the causal order too.
            context: the sequence to attend to instead of `x`, (batch, length, hidden_size), or its `keys_values`.
        """
        length = x.shape[1]
        if self.is_causal and cache is None:
            causal = self.causal_mask
            if length != causal.shape[0]:
                causal = causal[:length, :length]
            mask = causal if mask is None else mask + causal
        q = self._split_heads(self.q(x))
        k, v = context if isinstance(context, tuple) else self.keys_values(x if context is None else context)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        heads = scaled_dot_product_attention(q, k, v, mask, self.scale)
        return self.out(heads.transpose(1, 2).reshape(x.shape[0], length, -1))

    def keys_values(self, x: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        """Keys and values of `x`, each (batch, key heads, length, head size)."""
        return self._split_heads(self.k(x)), self._split_heads(self.v(x))

    def _split_heads(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, length, width) to (batch, heads, length, head size)."""
        batch, length, width = x.shape
        return x.reshape(batch, length, width // self.head_size, self.head_size).transpose(1, 2)


class GELUTanh(nn.Module):
    """GELU by a hyperbolic tangent, the approximation that GPT-2 was trained with (Hendrycks & Gimpel 2016)."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Element by element, of the same shape."""
        return flow._C.fast_gelu(x)


#: name -> what the inner units of `MLPBlock` compute
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "gelu_tanh": GELUTanh, "relu": nn.ReLU, "silu": nn.SiLU}


def activation_module(name: str) -> nn.Module:
    """The module in `ACTIVATIONS`. Raises `UserError` for a name that is not there."""
    if name not in ACTIVATIONS:
        raise UserError(f'activation="{name}" is not known. It is one of {", ".join(ACTIVATIONS)}.')
    return ACTIVATIONS[name]()


class MLPBlock(nn.Module):
    """The position-wise two-layer network of a block, with `inner_size` units in between."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str = "gelu", bias: bool = True):
        super().__init__()
        self.up = nn.Linear(hidden_size, inner_size, bias=bias)
        self.activation = activation_module(activation)
        self.down = nn.Linear(inner_size, hidden_size, bias=bias)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """`x` (…, hidden_size) to the same shape."""
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`, with `inner_size` units in between (SwiGLU and others, Shazeer 2020)."""

    def __init__(self, hidden_size: int, inner_size: int, bias: bool = False, activation: str = "silu"):
        super().__init__()
        self.activation = activation_module(activation)
        self.gate = nn.Linear(hidden_size, inner_size, bias=bias)
        self.up = nn.Linear(hidden_size, inner_size, bias=bias)
        self.down = nn.Linear(inner_size, hidden_size, bias=bias)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """`x` (…, hidden_size) to the same shape."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, with dropout on both branches.

    Args:
        norm: makes one of the two norms.
        dropout: rate on the elements of each branch.
        drop_path: rate at which a sample skips a branch altogether (stochastic depth).
        is_post_norm: `norm(x + attention(x))` and `norm(x + mlp(x))` instead (Vaswani et al. 2017).
        cross_attention: between the two, `x + cross_attention(norm(x))` to a context; not with `is_post_norm`.
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
        """`x` (batch, length, hidden_size) to the same shape; the other arguments as in `Attention`.

        `context`, and `context_mask`, which is added to its scores, go to the cross-attention.
        """
        read = x if self.is_post_norm else self.attention_norm(x)
        branch = self.attention(read, mask, rotation, cache)
        x = x + self.attention_drop_path(self.attention_dropout(branch))
        x = self.attention_norm(x) if self.is_post_norm else x
        if self.cross_attention is not None:
            branch = self.cross_attention(self.cross_attention_norm(x), context_mask, context=context)
            x = x + self.cross_attention_dropout(branch)
        branch = self.mlp(x if self.is_post_norm else self.mlp_norm(x))
        x = x + self.mlp_drop_path(self.mlp_dropout(branch))
        return self.mlp_norm(x) if self.is_post_norm else x


class ResPostNormBlock(Block):
    """`x + norm(attention(x))`, then `x + norm(mlp(x))`: a norm behind each branch (Liu et al. 2022)."""

    def forward(self, x: flow.Tensor, *args: Any, **kwargs: Any) -> flow.Tensor:
        """As `Block`, without cross-attention."""
        branch = self.attention_norm(self.attention_dropout(self.attention(x, *args, **kwargs)))
        x = x + self.attention_drop_path(branch)
        return x + self.mlp_drop_path(self.mlp_norm(self.mlp_dropout(self.mlp(x))))


def layer_norm_block(
    hidden_size: int,
    num_heads: int,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    causal_length: int | None = None,
    activation: str = "gelu",
    norm_eps: float = 1e-5,
    is_post_norm: bool = False,
) -> Block:
    """The block of GPT-2, BERT and ViT: layer norms, biases everywhere, `hidden_size * mlp_ratio` inner units."""
    return Block(
        Attention(hidden_size, num_heads, causal_length),
        MLPBlock(hidden_size, int(hidden_size * mlp_ratio), activation),
        partial(nn.LayerNorm, hidden_size, eps=norm_eps),
        dropout,
        drop_path,
        is_post_norm,
    )


def linear_rates(last: float, count: int) -> list[float]:
    """`count` rates that rise from 0 to `last`, for stochastic depth."""
    return [last * i / max(1, count - 1) for i in range(count)]


def embed_tokens(
    input_ids: flow.Tensor, tokens: nn.Embedding, table: flow.Tensor, positions: flow.Tensor | None = None
) -> flow.Tensor:
    """The token embeddings plus the learned positions, (batch, length, hidden_size).

    `input_ids` (batch, length) int64, `table` of positions (longest length, hidden_size). `positions` (batch, length)
    int64 where they are not 0, 1, 2, ….
    """
    length, max_length = input_ids.shape[1], table.shape[0]
    check_length(length, max_length)
    if positions is not None:
        return tokens(input_ids) + F.embedding(positions, table)
    return tokens(input_ids) + (table if length == max_length else table[:length])


def check_length(length: int, max_length: int) -> None:
    """Raise `UserError` for a sequence that is longer than the model has positions."""
    if length > max_length:
        raise UserError(
            f"the batch holds sequences of {length} tokens, but the model has {max_length} positions "
            f"(max_seq_length). Cut the sequences to {max_length}, or set max_seq_length={length}."
        )


def padding_mask(attention_mask: flow.Tensor) -> flow.Tensor:
    """The mask to add to attention scores for `attention_mask` (batch, length), 0 on padding: (batch, 1, 1, length)."""
    return ((attention_mask.to(flow.float32) - 1.0) * 1e9).reshape(attention_mask.shape[0], 1, 1, -1)
