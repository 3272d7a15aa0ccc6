"""Scaled dot-product attention, which is a fused operation on CUDA only in OneFlow 0.9.0, and
rotary positions.

Rotary position embedding rotates queries and keys by angles that grow with their position (Su et
al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow

from libai.utils.errors import UserError
from libai.utils.sizes import check_known, check_range

#: cosines and sines of the angles, each (length, head_size / 2) or (batch, 1, length, head_size /
#: 2)
Rotation = tuple[flow.Tensor, flow.Tensor]


def causal_mask(length: int) -> flow.Tensor:
    """Return an additive (length, length) mask: 0 if row i may attend to column j <= i, else -1e9.

    The models keep it as a buffer.
    """
    return flow.triu(flow.full((length, length), -1e9), diagonal=1)


def scaled_dot_product_attention(
    q: flow.Tensor,
    k: flow.Tensor,
    v: flow.Tensor,
    mask: flow.Tensor | None = None,
    scale: float | None = None,
) -> flow.Tensor:
    """Compute softmax(q k^T / sqrt(D) + mask) v (Vaswani et al. 2017).

    Shapes: `q` (..., T, D), `k` (..., S, D), `v` (..., S, E) -> (..., T, E).

    `mask` is *added* to the scores and broadcasts to (..., T, S). It is 0 for visible positions and
    a large negative number for hidden ones. If `q` is (B, H, T, D) and `k` and `v` have fewer
    heads, each of their heads is shared by `H / heads` consecutive heads of `q`. `scale` replaces
    `1 / sqrt(D)`.
    """
    shape = q.shape
    is_grouped = q.ndim == 4 and k.shape[1] != shape[1]
    if (
        is_grouped
    ):  # the queries of a group become rows of one matmul, so keys and values are not repeated
        q = q.reshape(shape[0], k.shape[1], -1, shape[3])
    scale = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
    scores = flow._C.matmul(q, k, transpose_b=True, alpha=scale)
    if mask is not None:
        rows = scores.reshape(*shape[:3], -1) if is_grouped else scores
        scores = (rows + mask).reshape(*scores.shape) if is_grouped else rows + mask
    heads = flow.matmul(flow.softmax(scores, dim=-1), v)
    return heads.reshape(*shape[:3], -1) if is_grouped else heads


def rotary_frequencies(
    head_size: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None
) -> np.ndarray:
    """Return the angle per position of each pair of elements, (head_size / 2,) float32: base^(-2 i
    / head_size).

    `scaling` has one of these forms:

    * None: no scaling.
    * `rope_type="linear"`: divides all frequencies by `factor` (Chen et al. 2023).
    * `rope_type="llama3"`: the scaling of Llama 3.1, with `factor`, `low_freq_factor`,
      `high_freq_factor` and `original_max_position_embeddings`. Low frequencies are divided by
      `factor`, high ones are unchanged, and those in between are interpolated.
    """
    if head_size % 2:
        raise UserError(
            f"head_size={head_size} is odd, but rotary positions rotate pairs of elements. Make "
            "it even."
        )
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    # NumPy's power in float32 is sometimes off by one bit, which distant positions multiply by
    # thousands
    frequencies = np.float32(1.0) / np.power(base, exponents.astype(np.float64)).astype(np.float32)
    kind = dict(scaling or {}).get("rope_type", "default")
    if kind == "default":
        return frequencies
    check_known("rotary_scaling.rope_type", kind, ("default", "linear", "llama3"))
    assert scaling is not None
    needed = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    for name in needed[: 1 if kind == "linear" else None]:
        check_range("0 < x < inf", **{f"rotary_scaling.{name}": scaling.get(name)})
    if kind == "linear":
        return frequencies / np.float32(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    waves = (
        float(scaling["original_max_position_embeddings"]) * frequencies / (2.0 * np.pi)
    )  # per original context
    kept = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return (kept * frequencies + (1.0 - kept) * frequencies / float(scaling["factor"])).astype(
        np.float32
    )


def rotation_at(positions: flow.Tensor, frequencies: flow.Tensor) -> Rotation:
    """Return the rotation of `positions`, which are (length,) or (batch, 1, length) float32.

    `frequencies` are (head_size / 2,).
    """
    angles = positions.unsqueeze(-1) * frequencies
    return flow.cos(angles), flow.sin(angles)


def rotate(x: flow.Tensor, rotation: Rotation) -> flow.Tensor:
    """Rotate each pair (i, i + head_size / 2) of `x` (batch, heads, length, head_size) by its
    angle.
    """
    cos, sin = rotation
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return flow.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
