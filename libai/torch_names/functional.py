"""Functions of `torch.nn.functional` that OneFlow 0.9.0 lacks or defines differently.

The public functions of this file are rows of the table in `names`; each docstring has the reason.
"""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

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
