"""Functions of `torch.nn.functional` that OneFlow 0.9.0 lacks or defines differently.

The public functions of this file are rows of the table in `names`; each docstring has the reason.
"""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai.config.torch_files import TorchNameError, users_line
from libai.layers.dropout import drop
from libai.layers.random import next_call_id


def nll_loss(input: Any, target: Any, weight: Any = None, **options: Any) -> Any:
    """Missing, although its layer exists."""
    return nn.NLLLoss(weight, **options)(input, target)


def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    """Missing."""
    axes = list(range(-len(normalized_shape), 0))
    eps = flow.finfo(input.dtype).eps if eps is None else eps
    unit = input * flow.rsqrt(flow.square(input).mean(axes, keepdim=True) + eps)
    return unit if weight is None else unit * weight


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """Missing."""
    if is_causal:
        if attn_mask is not None:  # as in PyTorch
            raise TorchNameError(f"{users_line()}: attention takes attn_mask or is_causal.")
        attn_mask = flow.ones(query.shape[-2], key.shape[-2], device=query.device).tril() > 0
    if attn_mask is not None and attn_mask.dtype == flow.bool:
        attn_mask = flow.logical_not(attn_mask)
    return attend([attn_mask], dropout_p, query, key, value, scale)[0]


def attend(
    masks: Any, dropout_p: float, query: Any, key: Any, value: Any, scale: float | None = None
) -> tuple[Any, Any]:
    """Return the outputs and weights of attention. A boolean mask is true for hidden keys."""
    scores = flow.matmul(query, key.transpose(-2, -1)) * (scale or query.shape[-1] ** -0.5)
    for mask in masks:
        if mask is None:
            continue
        if mask.dtype == flow.bool:
            scores = scores.masked_fill(mask, float("-inf"))
        else:
            scores = scores + mask
    shares = dropout(softmax(scores, -1), dropout_p)
    return flow.matmul(shares, value), shares


def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Missing. Keys cannot be added (`bias_k`, `add_zero_attn`) or given (`static_k`)."""
    if add_zero_attn or bias_k is not None or static_k is not None:
        raise TorchNameError(f"{users_line()}: attention has no bias_k, add_zero_attn, static_k.")
    out, shares = attend_in_heads(
        [one.transpose(0, 1) for one in (query, key, value)],
        (q_proj_weight, k_proj_weight, v_proj_weight)
        if use_separate_proj_weight
        else in_proj_weight.chunk(3),
        in_proj_bias,
        num_heads,
        (attn_mask, key_padding_mask),
        dropout_p if training else 0.0,
        need_weights,
        average_attn_weights,
    )
    out = nn.functional.linear(out, out_proj_weight, out_proj_bias)
    return out.transpose(0, 1), shares


def attend_in_heads(
    inputs: Any,
    weights: Any,
    bias: Any,
    num_heads: int,
    masks: tuple[Any, Any],
    dropout_p: float,
    needs_shares: bool,
    averages: bool,
) -> tuple[Any, Any]:
    """Return the outputs (N, L, E) of all heads, and their shares (N, heads, L, S), their average
    (N, L, S) or None.

    `inputs`: queries, keys and values, (N, length, features). `weights`: their projections.
    `masks`: (L, S) or (N * heads, L, S), and that of the keys, (N, S).
    """
    mask, key_mask = masks
    biases = [None] * 3 if bias is None else bias.chunk(3)
    heads = []
    for x, weight, part in zip(inputs, weights, biases):
        x = nn.functional.linear(x, weight, part)
        heads.append(x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2))
    if mask is not None and mask.ndim == 3:
        mask = mask.reshape(-1, num_heads, *mask.shape[1:])
    if key_mask is not None:
        key_mask = key_mask[:, None, None]
    out, shares = attend((mask, key_mask), dropout_p, *heads)
    out = out.transpose(1, 2).flatten(2)
    if not needs_shares:
        return out, None
    return out, shares.mean(1) if averages else shares


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Not seeded."""
    return drop(input, p, input.shape, next_call_id()) if training and p else input


def dropout2d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Not seeded. It drops whole channels."""
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
    return drop(input, p, shape, next_call_id()) if training and p else input


def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """`alpha` has no default."""
    return flow._C.elu(input, alpha)


def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """`negative_slope` has no default."""
    return flow._C.leaky_relu(input, negative_slope)


def softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """`dtype` is missing."""
    return flow.softmax(input if dtype is None else input.to(dtype), dim)


def smooth_l1_loss(input: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Any:
    """`beta` has no default."""
    return flow._C.smooth_l1_loss(input, target, beta, reduction)


def pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """mode="circular" is missing, and a value of None."""
    if mode != "circular":
        return nn.functional.pad(input, list(pad), mode, value or 0.0)
    for axis, low in enumerate(pad[::2], start=1):
        length = input.shape[-axis]
        index = flow.arange(-low, length + pad[2 * axis - 1], device=input.device) % length
        input = flow.index_select(input, input.ndim - axis, index)
    return input
