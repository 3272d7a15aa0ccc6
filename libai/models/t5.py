"""T5: an encoder and a decoder with relative positions, RMS norms and no biases (Raffel et al.
2020).

T5 1.1 and mT5 (Xue et al. 2021) are the same model with gated units and a separate output layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.layers import Dropout, RMSNorm, causal_mask
from libai.models.blocks.init import init_weights, transformer_std
from libai.models.blocks.outputs import LanguageModel
from libai.models.blocks.transformer import (
    ATTENTION_SPLIT,
    RESIDUAL_PROJECTIONS,
    Attention,
    Block,
    GatedMLP,
    MLPBlock,
    check_length,
    padding_mask,
    plan_of_blocks,
)
from libai.utils.errors import UserError
from libai.utils.sizes import check_range, check_sizes

_ENCODER_SPLIT = {**ATTENTION_SPLIT, "mlp.up.weight": 0, "mlp.down.weight": 1}
_CROSS_SPLIT = {f"cross_{name}": axis for name, axis in ATTENTION_SPLIT.items()}


class RelativeBias(nn.Module):
    """Attention biases that depend on the distance from query to key, with a learned value per
    bucket of distances.

    Args:
        num_heads: number of heads, each with its own biases.
        max_length: maximum sequence length.
        num_buckets, max_distance: see `relative_buckets`.
        is_causal: use all buckets for keys before the query, because later keys are never visible.
    """

    def __init__(
        self, num_heads: int, max_length: int, num_buckets: int, max_distance: int, is_causal: bool
    ):
        super().__init__()
        self.table = nn.Embedding(num_buckets, num_heads)
        buckets = relative_buckets(max_length, num_buckets, max_distance, is_causal)
        self.register_buffer("buckets", flow.from_numpy(buckets), persistent=False)

    def forward(self, num_keys: int, positions: flow.Tensor | None = None) -> flow.Tensor:
        """Return the biases (1, heads, queries, keys).

        Keys are at positions 0, 1, 2, …. Queries are at the same positions, or at `positions`
        (queries,) int64.
        """
        check_length(num_keys, self.buckets.shape[0])
        buckets = (
            self.buckets[:num_keys]
            if positions is None
            else flow.index_select(self.buckets, 0, positions)
        )
        return self.table(buckets[:, :num_keys]).permute(2, 0, 1).unsqueeze(0)


def relative_buckets(
    length: int, num_buckets: int, max_distance: int, is_causal: bool
) -> np.ndarray:
    """Return the bucket of every pair of query and key, (length, length) int64.

    The buckets are divided between the two directions unless `is_causal`. Half of the buckets of a
    direction represent a single distance each. The others represent ranges that grow exponentially
    up to `max_distance`. All larger distances share the last bucket.
    """
    order = np.arange(length)
    distance = order[:, None] - order[None, :]
    first = np.zeros_like(distance)
    if is_causal:
        distance = np.maximum(distance, 0)
    else:
        num_buckets //= 2
        first, distance = np.where(distance < 0, num_buckets, 0), np.abs(distance)
    num_exact = num_buckets // 2
    ratio = np.maximum(distance, num_exact).astype(np.float32) / np.float32(num_exact)
    octaves = np.log(ratio) / np.float32(math.log(max_distance / num_exact))
    far = np.minimum(
        num_exact + (octaves * np.float32(num_buckets - num_exact)).astype(np.int64),
        num_buckets - 1,
    )
    return first + np.where(distance < num_exact, distance, far)


class T5Encoder(nn.Module):
    """The encoder only, which computes the features of a text.

    Args: vocab_size: number of token ids. max_seq_length: maximum sequence length. hidden_size,
        num_layers, num_heads: size of the blocks. inner_size: number of hidden units in the network
        of each block. head_size: width of a head (default: `hidden_size / num_heads`). dropout:
        dropout probability on the embeddings and on the branches of each block. activation,
        is_gated: settings of the hidden units: "relu", or "gelu_tanh" with gates in T5 1.1 and mT5.
        num_buckets, max_distance: settings of the relative positions, see `relative_buckets`.
        norm_eps: added to the mean square in every norm. num_decoder_layers: number of decoder
        blocks, which `T5` appends to `blocks`.
    """

    #: see `libai.models.GPT.plan`; gates are split too if the model has them
    plan = plan_of_blocks("blocks", _ENCODER_SPLIT)

    def __init__(
        self,
        vocab_size: int,
        max_seq_length: int,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        inner_size: int = 512,
        head_size: int | None = None,
        dropout: float = 0.0,
        activation: str = "relu",
        is_gated: bool = False,
        num_buckets: int = 32,
        max_distance: int = 128,
        norm_eps: float = 1e-6,
        num_decoder_layers: int = 0,
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, max_seq_length=max_seq_length, hidden_size=hidden_size)
        check_sizes(num_layers=num_layers, num_heads=num_heads, inner_size=inner_size)
        check_range("0 < x < inf", norm_eps=norm_eps)
        self.num_encoder_layers = num_layers
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.embedding_dropout = Dropout(dropout)
        self.encoder_bias = RelativeBias(
            num_heads, max_seq_length, num_buckets, max_distance, is_causal=False
        )
        self.encoder_norm = RMSNorm(hidden_size, norm_eps)
        mlp = partial(
            GatedMLP if is_gated else MLPBlock,
            hidden_size,
            inner_size,
            bias=False,
            activation=activation,
        )
        # scores are not scaled; the initial query weights compensate for it
        attention = partial(
            Attention, hidden_size, num_heads, None, None, head_size, False, False, scale=1.0
        )
        norm = partial(RMSNorm, hidden_size, norm_eps)
        self.blocks = nn.ModuleList(
            [
                Block(
                    attention(),
                    mlp(),
                    norm,
                    dropout,
                    cross_attention=attention() if i >= num_layers else None,
                )
                for i in range(num_layers + num_decoder_layers)
            ]
        )
        if is_gated:
            self.plan = {
                **self.plan,
                "split": {**self.plan["split"], "blocks.*.mlp.gate.weight": 0},
            }
        if not num_decoder_layers:
            self.init_weights()

    def init_weights(self) -> None:
        """Initialize all parameters. Called when the model is complete."""
        hidden_size, head_size = (
            self.token_embedding.weight.shape[1],
            self.blocks[0].attention.head_size,
        )
        plain = transformer_std(hidden_size, len(self.blocks), RESIDUAL_PROJECTIONS)

        def std(name: str, parameter: nn.Parameter) -> float:
            if name.endswith("attention.q.weight"):
                return plain(name, parameter) / math.sqrt(head_size)
            if name == "token_embedding.weight" and getattr(self, "scales_head", False):
                # the head divides by sqrt(hidden_size), so logits are as small as in other models
                return 0.5
            return plain(name, parameter)

        init_weights(self, std)

    def encode(
        self, input_ids: flow.Tensor, attention_mask: flow.Tensor | None = None
    ) -> flow.Tensor:
        """Return the normalized output of the encoder, (batch, length, hidden_size).

        See `T5.forward` for the arguments.
        """
        mask = self.encoder_bias(input_ids.shape[1])
        if attention_mask is not None:
            mask = mask + padding_mask(attention_mask)
        x = self.embedding_dropout(self.token_embedding(input_ids))
        for i, block in enumerate(self.blocks):
            x = block(x, mask) if i < self.num_encoder_layers else x
        return self.encoder_norm(x)

    def forward(
        self, input_ids: flow.Tensor, attention_mask: flow.Tensor | None = None
    ) -> dict[str, Any]:
        """Return `{"features": (batch, length, hidden_size)}` for a batch of texts."""
        return {"features": self.encode(input_ids, attention_mask)}


class T5(T5Encoder, LanguageModel):
    """The encoder, with a decoder that continues a target and attends to the encoded text.

    Args: vocab_size, max_seq_length: see `T5Encoder`. num_decoder_layers: number of decoder blocks
        (default: the same as in the encoder). max_target_length: maximum target length (default:
        `max_seq_length`). tie_head: use the token embedding as the output layer, as one shared
        parameter. scales_head: divide the features by `sqrt(hidden_size)` before the output layer
        (default: only if it is tied). start_token: token that precedes every target. ignore_index:
        label of positions that are not counted. encoder: other arguments of `T5Encoder`.
    """

    plan = plan_of_blocks("blocks", {**_ENCODER_SPLIT, **_CROSS_SPLIT})

    def __init__(
        self,
        vocab_size: int,
        max_seq_length: int,
        num_decoder_layers: int | None = None,
        max_target_length: int | None = None,
        tie_head: bool = True,
        scales_head: bool | None = None,
        start_token: int = 0,
        ignore_index: int = -100,
        **encoder: Any,
    ):
        num_decoder_layers = (
            encoder.get("num_layers", 4) if num_decoder_layers is None else num_decoder_layers
        )
        check_sizes(num_decoder_layers=num_decoder_layers)
        super().__init__(
            vocab_size, max_seq_length, num_decoder_layers=num_decoder_layers, **encoder
        )
        hidden_size, num_heads = (
            self.token_embedding.weight.shape[1],
            self.blocks[0].attention.num_heads,
        )
        self.max_seq_length, self.max_target_length = (
            max_seq_length,
            max_target_length or max_seq_length,
        )
        self.num_decoder_layers = num_decoder_layers
        self.scales_head = tie_head if scales_head is None else scales_head
        self.start_token, self.ignore_index = start_token, ignore_index
        distances = encoder.get("num_buckets", 32), encoder.get("max_distance", 128)
        self.decoder_bias = RelativeBias(
            num_heads, self.max_target_length, *distances, is_causal=True
        )
        causal = causal_mask(self.max_target_length)
        self.register_buffer("causal_mask", causal, persistent=False)
        self.decoder_norm = RMSNorm(hidden_size, encoder.get("norm_eps", 1e-6))
        self.head = None if tie_head else nn.Linear(hidden_size, vocab_size, bias=False)
        self.init_weights()

    def forward(  # type: ignore[override]
        self,
        input_ids: flow.Tensor,
        labels: flow.Tensor | None = None,
        attention_mask: flow.Tensor | None = None,
        decoder_input_ids: flow.Tensor | None = None,
    ) -> dict[str, Any]:
        """Run the model on a text and its target: `input_ids` (batch, length), `labels` (batch,
        target length), int64.

        `attention_mask` (batch, length) int64 is 0 on padding, 1 elsewhere. The decoder reads
        `decoder_input_ids`, by default `start_token` followed by the labels without the last one.
        Returns the loss `lm` in nats per counted label, or `{"logits": (batch, target length,
        vocab_size)}` without labels.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise UserError(
                    "T5 got neither labels nor decoder_input_ids, so its decoder has no input. "
                    "Pass one of them."
                )
            counted = flow.where(labels == self.ignore_index, labels * 0 + self.start_token, labels)
            decoder_input_ids = flow.cat(
                [counted[:, :1] * 0 + self.start_token, counted[:, :-1]], dim=1
            )
        context = self.encode(input_ids, attention_mask)
        context_mask = None if attention_mask is None else padding_mask(attention_mask)
        length = decoder_input_ids.shape[1]
        mask = self.causal_mask[:length, :length]
        features = self.features(decoder_input_ids, None, mask, None, context, context_mask)
        return self.outputs(self.logits(features), labels)

    def features(
        self,
        input_ids: flow.Tensor,
        positions: flow.Tensor | None,
        mask: flow.Tensor,
        caches: Sequence[Any] | None,
        context: flow.Tensor,
        context_mask: flow.Tensor | None = None,
    ) -> flow.Tensor:
        """Return the input of the output layer for the target, (batch, target length, hidden_size).

        `input_ids` are the tokens of the target. `positions` must be equal in all rows. `context`
        can be the encoder's output or the result of `keys_values`. The other arguments are the same
        as in `GPT.features` and `Block`.
        """
        mask = mask + self.decoder_bias(mask.shape[-1], None if positions is None else positions[0])
        x = self.embedding_dropout(self.token_embedding(input_ids))
        for i, block in enumerate(self.blocks):
            if i >= self.num_encoder_layers:
                number = i - self.num_encoder_layers
                pair = (
                    context if context.ndim == 3 else (context[2 * number], context[2 * number + 1])
                )
                x = block(
                    x, mask, None, None if caches is None else caches[number], pair, context_mask
                )
        features = self.decoder_norm(x)
        return features * features.shape[-1] ** -0.5 if self.scales_head else features

    def keys_values(
        self, input_ids: flow.Tensor, attention_mask: flow.Tensor
    ) -> tuple[flow.Tensor, flow.Tensor]:
        """Encode a text for generation, and return the arguments `context` and `context_mask` of
        `features`.

        `context` contains the keys and values of all decoder blocks, (2 * layers, batch, heads,
        length, head size). `context_mask` is added to the scores.
        """
        features = self.encode(input_ids, attention_mask)
        decoder = list(self.blocks)[self.num_encoder_layers :]
        pairs = [
            tensor for block in decoder for tensor in block.cross_attention.keys_values(features)
        ]
        return flow.stack(pairs, dim=0), padding_mask(attention_mask)
