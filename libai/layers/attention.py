"""Scaled dot-product attention, which OneFlow 0.9.0 has as a fused operation on CUDA only."""

from __future__ import annotations

import math

import oneflow as flow


def causal_mask(length: int) -> flow.Tensor:
    """Additive (length, length) mask: 0 where row i may look at column j <= i, else -1e9; kept as a buffer."""
    return flow.triu(flow.full((length, length), -1e9), diagonal=1)


def scaled_dot_product_attention(
    q: flow.Tensor, k: flow.Tensor, v: flow.Tensor, mask: flow.Tensor | None = None
) -> flow.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v (Vaswani et al. 2017): (..., T, D), (..., S, D), (..., S, E) -> (..., T, E).

    `mask` is *added* to the scores and broadcasts to (..., T, S): 0 to look, a large negative number not to.
    """
    scores = flow._C.matmul(q * (1.0 / math.sqrt(q.shape[-1])), k, transpose_b=True)
    return flow.matmul(flow.softmax(scores if mask is None else scores + mask, dim=-1), v)
