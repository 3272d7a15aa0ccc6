"""Scaled dot-product attention, which OneFlow 0.9.0 has as a fused operation on CUDA only."""

from __future__ import annotations

import math

import oneflow as flow


def causal_mask(length: int) -> flow.Tensor:
    """Additive (length, length) mask: 0 where row i may look at column j <= i, else -1e9; kept as a buffer."""
    return flow.triu(flow.full((length, length), -1e9), diagonal=1)


def scaled_dot_product_attention(
    q: flow.Tensor, k: flow.Tensor, v: flow.Tensor, mask: flow.Tensor | None = None, scale: float | None = None
) -> flow.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v (Vaswani et al. 2017): (..., T, D), (..., S, D), (..., S, E) -> (..., T, E).

    `mask` is *added* to the scores and broadcasts to (..., T, S): 0 to look, a large negative number not to. Where `q`
    is (B, H, T, D) and `k` and `v` have fewer heads, each of these serves H / heads neighbouring heads of `q`. `scale`
    takes the place of 1 / sqrt(D).
    """
    shape = q.shape
    is_grouped = q.ndim == 4 and k.shape[1] != shape[1]
    if is_grouped:  # the queries of a group become rows of one product: keys and values are not repeated
        q = q.reshape(shape[0], k.shape[1], -1, shape[3])
    scale = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
    scores = flow._C.matmul(q if scale == 1.0 else q * scale, k, transpose_b=True)
    if mask is not None:
        rows = scores.reshape(*shape[:3], -1) if is_grouped else scores
        scores = (rows + mask).reshape(*scores.shape) if is_grouped else rows + mask
    heads = flow.matmul(flow.softmax(scores, dim=-1), v)
    return heads.reshape(*shape[:3], -1) if is_grouped else heads
