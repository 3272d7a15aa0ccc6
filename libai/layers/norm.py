"""Root-mean-square normalisation, which OneFlow 0.9.0 has for CUDA only."""

from __future__ import annotations

from collections.abc import Sequence

import oneflow as flow
from oneflow import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the trailing axes `normalized_shape` (Zhang & Sennrich 2019).

    `weight` is absent without `elementwise_affine`.
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-6, elementwise_affine: bool = True):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(flow.ones(*self.normalized_shape)) if elementwise_affine else None

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Normalise `x`, of shape (..., *normalized_shape)."""
        axes = list(range(x.ndim - len(self.normalized_shape), x.ndim))
        unit = x * flow.rsqrt(flow.square(x).mean(axes, keepdim=True) + self.eps)
        return unit if self.weight is None else unit * self.weight

    def extra_repr(self) -> str:
        """The arguments, for `print(model)`."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"
