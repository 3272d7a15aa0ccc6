"""The attention and Transformer layers of `torch.nn`, which OneFlow 0.9.0 lacks.

Parameters have PyTorch's names and initialization. The public names of this file are rows of the
table in `names`. Inputs have three axes. A query whose keys are all hidden gives NaN,
which stops the run. `is_causal` is only a hint in PyTorch, so the mask alone decides.
"""

from __future__ import annotations

import copy
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.config.torch_files import TorchNameError, users_line
from libai.torch_names import functional
from libai.torch_names.layers import Dropout, LayerNorm


class MultiheadAttention(nn.Module):
    """Missing."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        **others: Any,
    ):
        super().__init__()
        if any(others.values()):  # such as kdim and add_bias_kv; None and False have no effect
            raise TorchNameError(f"{users_line()}: MultiheadAttention has no {list(others)}.")
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        weight = nn.Parameter(flow.empty(3 * embed_dim, embed_dim))
        self.in_proj_weight = nn.init.xavier_uniform_(weight)
        self.in_proj_bias = nn.Parameter(flow.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:
        """Return the outputs, shaped like `query`, and the attention weights or None."""
        inputs = [query, key, value]
        if not self.batch_first:
            inputs = [one.transpose(0, 1) for one in inputs]
        out, shares = functional.attend_in_heads(
            inputs,
            self.in_proj_weight.chunk(3),
            self.in_proj_bias,
            self.num_heads,
            (attn_mask, key_padding_mask),
            self.dropout if self.training else 0.0,
            need_weights,
            average_attn_weights,
        )
        out = self.out_proj(out)
        return out if self.batch_first else out.transpose(0, 1), shares


class TransformerEncoderLayer(nn.Module):
    """Missing."""

    _attentions: tuple[str, ...] = ("self_attn",)

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        for name in self._attentions:
            self.add_module(
                name, MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first)
            )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.dropout = Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        for number in range(1, len(self._attentions) + 2):
            self.add_module(f"norm{number}", LayerNorm(d_model, layer_norm_eps, bias=bias))
            self.add_module(f"dropout{number}", Dropout(dropout))
        self.norm_first = norm_first
        if isinstance(activation, str):
            activation = getattr(nn.functional, activation)
        self.activation = activation

    def forward(
        self,
        src: Any,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool = False,
    ) -> Any:
        """Return the new values of `src`."""
        x = self._add(1, src, self._attend, src_key_padding_mask, False, src_mask)
        return self._add(2, x, self._feed)

    def _add(self, number: int, x: Any, branch: Any, *args: Any) -> Any:
        """Add `branch(x)` to `x`, with the norm before the branch or after the sum."""
        norm = getattr(self, f"norm{number}")
        dropout = getattr(self, f"dropout{number}")
        if self.norm_first:
            return x + dropout(branch(norm(x), *args))
        return norm(x + dropout(branch(x, *args)))

    def _attend(self, x: Any, *masks: Any) -> Any:
        return self.self_attn(x, x, x, *masks)[0]

    def _feed(self, x: Any) -> Any:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerDecoderLayer(TransformerEncoderLayer):
    """Missing."""

    _attentions = ("self_attn", "multihead_attn")

    def forward(  # type: ignore[override]  # PyTorch's arguments
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Any:
        """Return the new values of `tgt`."""
        x = self._add(1, tgt, self._attend, tgt_key_padding_mask, False, tgt_mask)
        x = self._add(2, x, self._attend_to, memory, memory_key_padding_mask, False, memory_mask)
        return self._add(3, x, self._feed)

    def _attend_to(self, x: Any, memory: Any, *masks: Any) -> Any:
        return self.multihead_attn(x, memory, memory, *masks)[0]


class TransformerEncoder(nn.Module):
    """Missing. In evaluation, PyTorch may replace the outputs of hidden positions by zeros."""

    def __init__(self, encoder_layer: Any, num_layers: int, norm: Any = None, **speed: bool):
        super().__init__()
        self.layers = nn.ModuleList([copy.deepcopy(encoder_layer) for _ in range(num_layers)])
        self.norm = norm

    def forward(self, src: Any, mask: Any = None, *args: Any, **options: Any) -> Any:
        """Return the last layer's output, normalized. The layers get the other arguments."""
        options.update(zip(("src_key_padding_mask", "is_causal"), args))
        return self._run(src, src_mask=mask, **options)

    def _run(self, x: Any, *args: Any, **options: Any) -> Any:
        """Call the layers, which may be the user's, with PyTorch's names of arguments."""
        for layer in self.layers:
            x = layer(x, *args, **options)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(TransformerEncoder):
    """Missing."""

    _masks = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")

    def __init__(self, decoder_layer: Any, num_layers: int, norm: Any = None):
        super().__init__(decoder_layer, num_layers, norm)

    def forward(  # type: ignore[override]  # PyTorch's arguments
        self, tgt: Any, memory: Any, *masks: Any, **options: Any
    ) -> Any:
        """Return the last layer's output, normalized. The layers get the other arguments."""
        options.update(zip(self._masks, masks))
        return self._run(tgt, memory, **options)


class Transformer(nn.Module):
    """Missing."""

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        *args: Any,
        **options: Any,
    ):
        super().__init__()
        encoder = TransformerEncoderLayer(d_model, nhead, *args, **options)
        decoder = TransformerDecoderLayer(d_model, nhead, *args, **options)
        self.encoder = TransformerEncoder(encoder, num_encoder_layers, encoder.norm1)
        self.decoder = TransformerDecoder(decoder, num_decoder_layers, decoder.norm1)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        src: Any,
        tgt: Any,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Any = None,
        *masks: Any,
        src_is_causal: bool = False,
        **options: Any,
    ) -> Any:
        """Return the decoder's outputs, shaped like `tgt`. It gets the masks of keys."""
        memory = self.encoder(src, src_mask, src_key_padding_mask)
        return self.decoder(tgt, memory, tgt_mask, memory_mask, *masks, **options)

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None) -> Any:
        """Return (sz, sz): -inf above the diagonal, else 0."""
        return flow.full((sz, sz), float("-inf"), device=device).triu(1)
