"""Llama: a decoder-only language model with rotary positions, RMS norms, gated units and grouped
queries.

See Touvron et al. 2023. Qwen2 and Mistral are the same model with different sizes and biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.layers import RMSNorm, rotary_frequencies, rotation_at
from libai.models.blocks.init import init_weights, transformer_std
from libai.models.blocks.outputs import LanguageModel
from libai.models.blocks.transformer import (
    ATTENTION_BIAS_SPLIT,
    ATTENTION_SPLIT,
    RESIDUAL_PROJECTIONS,
    Attention,
    Block,
    GatedMLP,
    check_length,
    padding_mask,
    plan_of_blocks,
)
from libai.utils.sizes import check_range, check_sizes

_SPLIT = {**ATTENTION_SPLIT, "mlp.gate.weight": 0, "mlp.up.weight": 0, "mlp.down.weight": 1}
_MLP_BIAS_SPLIT = {"mlp.gate.bias": 0, "mlp.up.bias": 0}


class Llama(LanguageModel):
    """A causal language model over token ids.

    Args: vocab_size: number of token ids. max_seq_length: maximum sequence length, which does not
        affect memory by itself. hidden_size, num_layers, num_heads: size of the blocks. inner_size:
        number of gated units in each block. num_kv_heads: number of key and value heads, a divisor
        of `num_heads` (default: `num_heads`). head_size: width of a head (default: `hidden_size /
        num_heads`). rotary_base, rotary_scaling: see `libai.layers.rotary_frequencies`. norm_eps:
        added to the mean square in every norm. qkv_bias, out_bias, mlp_bias: whether the linear
        layers of a block have a bias (in Qwen2 only `qkv_bias`). tie_head: use the token embedding
        as the output layer, as one shared parameter. ignore_index: label of positions that are not
        counted. activation: activation of the gates.
    """

    #: see `libai.models.GPT.plan`; biases are split too if the model has them
    plan = plan_of_blocks("blocks", _SPLIT)

    def __init__(
        self,
        vocab_size: int,
        max_seq_length: int,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        inner_size: int = 384,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        rotary_base: float = 10000.0,
        rotary_scaling: Mapping[str, Any] | None = None,
        norm_eps: float = 1e-5,
        qkv_bias: bool = False,
        out_bias: bool = False,
        mlp_bias: bool = False,
        tie_head: bool = False,
        ignore_index: int = -100,
        activation: str = "silu",
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, max_seq_length=max_seq_length, hidden_size=hidden_size)
        check_sizes(num_layers=num_layers, num_heads=num_heads, inner_size=inner_size)
        check_range("0 < x < inf", rotary_base=rotary_base, norm_eps=norm_eps)
        self.ignore_index = ignore_index
        self.max_seq_length = max_seq_length
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            [
                Block(
                    Attention(
                        hidden_size, num_heads, None, num_kv_heads, head_size, qkv_bias, out_bias
                    ),
                    GatedMLP(hidden_size, inner_size, mlp_bias, activation),
                    partial(RMSNorm, hidden_size, norm_eps),
                )
                for _ in range(num_layers)
            ]
        )
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.head = None if tie_head else nn.Linear(hidden_size, vocab_size, bias=False)
        frequencies = rotary_frequencies(
            self.blocks[0].attention.head_size, rotary_base, rotary_scaling
        )
        self.register_buffer("frequencies", flow.from_numpy(frequencies), persistent=False)
        positions = flow.from_numpy(np.arange(max_seq_length, dtype=np.float32))
        self.register_buffer("positions", positions, persistent=False)
        if qkv_bias or mlp_bias:
            biases = {
                **(ATTENTION_BIAS_SPLIT if qkv_bias else {}),
                **(_MLP_BIAS_SPLIT if mlp_bias else {}),
            }
            self.plan = plan_of_blocks("blocks", {**_SPLIT, **biases})
        init_weights(self, transformer_std(hidden_size, num_layers, RESIDUAL_PROJECTIONS))

    def forward(
        self,
        input_ids: flow.Tensor,
        labels: flow.Tensor | None = None,
        attention_mask: flow.Tensor | None = None,
    ) -> dict[str, Any]:
        """Run the model on `input_ids` and `labels`, (batch, length) int64.

        `labels[:, i]` is the token after `input_ids[:, i]`.

        `attention_mask` (batch, length) int64 is 0 on padding, 1 elsewhere. Returns the loss `lm`
        in nats per counted label, or `{"logits": (batch, length, vocab_size)}` without labels.
        """
        mask = None if attention_mask is None else padding_mask(attention_mask)
        return self.outputs(self.logits(self.features(input_ids, mask=mask)), labels)

    def features(
        self,
        input_ids: flow.Tensor,
        positions: flow.Tensor | None = None,
        mask: flow.Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> flow.Tensor:
        """Return the normalized output of the last block, (batch, length, hidden_size).

        See `GPT.features` for the arguments that generation passes.
        """
        length = input_ids.shape[1]
        check_length(length, self.max_seq_length)
        order = self.positions if length == self.max_seq_length else self.positions[:length]
        if caches is None:
            causal = (order.unsqueeze(0) - order.unsqueeze(1)).clamp(0.0, 1.0) * -1e9
            mask = causal if mask is None else mask + causal
        if positions is not None:
            order = positions.to(flow.float32).unsqueeze(1)
        rotation = rotation_at(order, self.frequencies)
        x = self.token_embedding(input_ids)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, rotation, None if caches is None else caches[i])
        return self.norm(x)
