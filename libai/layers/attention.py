"""Scaled dot-product attention in the formulation that is fastest on OneFlow's CPU kernels, for both modes."""

from __future__ import annotations

import functools
import math

import oneflow as flow
from oneflow import nn

from libai.layers.cpu import full_beside, is_written_out, sum_over_rows
from libai.layers.linear import is_plain_linear, multiply_rows


def attention_scores(q: flow.Tensor, k: flow.Tensor) -> flow.Tensor:
    """`q @ k^T`: (..., T, D), (..., S, D) -> (..., T, S); twice as fast on CPU as a transposed copy of `k`."""
    return flow._C.matmul(q, k, False, True)


def causal_mask(like: flow.Tensor, length: int) -> flow.Tensor:
    """Additive (length, length) mask beside `like`: 0 where row i may look at column j <= i, else -1e9.

    Adding it costs 0.3 ns per score on CPU; OneFlow's `masked_fill` and `where` cost 4 to 60.
    """
    return flow.triu(full_beside(like, (length, length), -1e9), 1)


def scaled_dot_product_attention(
    q: flow.Tensor, k: flow.Tensor, v: flow.Tensor, mask: flow.Tensor | None = None, causal: bool = False
) -> flow.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v (Vaswani et al. 2017): (..., T, D), (..., S, D), (..., S, E) -> (..., T, E).

    `mask` is *added* to the scores and broadcasts to (..., T, S): 0 to look, a large negative number not to. `causal`
    adds `causal_mask`, and then T = S; a model that runs on a mesh or in a graph rather keeps that mask as a buffer.
    """
    if causal:
        causal_part = causal_mask(q, q.shape[-2])
        mask = causal_part if mask is None else mask + causal_part
    return _attend(q * (1.0 / math.sqrt(q.shape[-1])), k, v, mask)


def self_attention(
    x: flow.Tensor, q: nn.Module, k: nn.Module, v: nn.Module, num_heads: int, mask: flow.Tensor | None = None
) -> flow.Tensor:
    """Multi-head attention of `x` to itself, before the output layer: (B, T, D) -> (B, T, heads * head width).

    `q`, `k`, `v` are the layers that make queries, keys and values of all heads; `mask` as for
    `scaled_dot_product_attention`. In eager training on CPU three plain linear layers become one matrix product.
    """
    if _can_be_joined(x, q, k, v):
        parameters = (q.weight, k.weight, v.weight, q.bias, k.bias, v.bias)
        heads = _joint_projection(num_heads, x.requires_grad).apply(x, *parameters)
        return _merging(num_heads).apply(_attend(heads[0], heads[1], heads[2], mask))
    queries, keys, values = (_split_heads(layer(x), num_heads) for layer in (q, k, v))
    return _merge_heads(scaled_dot_product_attention(queries, keys, values, mask))


def _attend(q: flow.Tensor, k: flow.Tensor, v: flow.Tensor, mask: flow.Tensor | None) -> flow.Tensor:
    """softmax(q k^T + mask) v."""
    scores = attention_scores(q, k)
    return flow.matmul(flow.softmax(scores if mask is None else scores + mask, dim=-1), v)


def _split_heads(x: flow.Tensor, num_heads: int) -> flow.Tensor:
    """(B, T, heads * width) -> (B, heads, T, width)."""
    batch, length, width = x.shape
    return x.reshape(batch, length, num_heads, width // num_heads).transpose(1, 2)


def _merge_heads(x: flow.Tensor) -> flow.Tensor:
    """(B, heads, T, width) -> (B, T, heads * width)."""
    batch, heads, length, width = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * width)


def _can_be_joined(x: flow.Tensor, *layers: nn.Module) -> bool:
    """True if the layers can be skipped for their parameters: nothing of the user's hangs on them."""
    if not all(is_plain_linear(layer) and layer.weight.shape == layers[0].weight.shape for layer in layers):
        return False
    return is_written_out(x, *(parameter for layer in layers for parameter in (layer.weight, layer.bias)))


@functools.cache
def _joint_projection(num_heads: int, needs_input_grad: bool) -> type[flow.autograd.Function]:
    """Queries (divided by sqrt(head width)), keys and values of all heads, each (B, heads, T, width), by one product.

    One copy instead of three puts the heads before the positions, and the scale is applied to the weights.
    """

    class JointProjection(flow.autograd.Function):
        @staticmethod
        def forward(ctx, x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias):
            batch, length, width = x.shape
            inner = q_weight.shape[0]
            head_width = inner // num_heads
            scale = 1.0 / math.sqrt(head_width)
            weight = flow.cat([q_weight * scale, k_weight, v_weight])
            bias = flow.cat([q_bias * scale, k_bias, v_bias])
            rows = x.reshape(-1, width)
            ctx.save_for_backward(rows, weight)
            joined = multiply_rows(rows, weight, bias)
            heads = joined.reshape(batch, length, 3, num_heads, head_width).permute(2, 0, 3, 1, 4).contiguous()
            return tuple(part.reshape(batch, num_heads, length, head_width) for part in _thirds(heads))

        @staticmethod
        def backward(ctx, q_grad, k_grad, v_grad):
            rows, weight = ctx.saved_tensors
            batch, _, length, head_width = q_grad.shape
            scale = 1.0 / math.sqrt(head_width)
            heads = flow.cat([q_grad, k_grad, v_grad]).reshape(3, batch, num_heads, length, head_width)
            joined = heads.permute(1, 3, 0, 2, 4).reshape(batch * length, weight.shape[0])
            grad_x = flow._C.matmul(joined, weight).reshape(batch, length, -1) if needs_input_grad else None
            q_weight, k_weight, v_weight = _thirds(flow._C.matmul(joined, rows, True, False))
            q_bias, k_bias, v_bias = _thirds(sum_over_rows(joined))
            return grad_x, q_weight * scale, k_weight, v_weight, q_bias * scale, k_bias, v_bias

    return JointProjection


def _thirds(x: flow.Tensor) -> list[flow.Tensor]:
    """Three views of equal length on axis 0."""
    length = x.shape[0] // 3
    return [flow._C.narrow(x, 0, i * length, length) for i in range(3)]


@functools.cache
def _merging(num_heads: int) -> type[flow.autograd.Function]:
    """`_merge_heads` with a gradient that is copied into place once, and not by each product that reads it."""

    class Merging(flow.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return _merge_heads(x)

        @staticmethod
        def backward(ctx, grad):
            return _split_heads(grad, num_heads).contiguous()

    return Merging
