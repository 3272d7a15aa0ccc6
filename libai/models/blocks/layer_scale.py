"""A learned factor for each channel of a branch (Touvron et al. 2021, "Going deeper with image transformers")."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn


class LayerScale(nn.Module):
    """`x * weight` along the last axis; weights begin with `start`, which `reset_layer_scales` sets."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(flow.ones(width))

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """`x` (…, width) to the same shape."""
        return x * self.weight


def reset_layer_scales(model: nn.Module) -> None:
    """Where training begins; after `init_weights`, which knows weights of one axis as scales of norms."""
    for module in model.modules():
        if isinstance(module, LayerScale):
            module.weight.data.fill_(module.start)
