"""ResMLP: alternating linear layers over the patches and over the channels, without attention
(Touvron et al. 2021).
"""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers import DropPath
from libai.models.blocks.init import fan_in_std, init_weights
from libai.models.blocks.patches import PatchClassifier
from libai.models.blocks.transformer import MLP_SPLIT, RESIDUAL_PROJECTIONS, MLPBlock
from libai.utils.sizes import check_range, check_sizes


class Affine(nn.Module):
    """A scale and shift per channel, `x * weight + bias`, used in place of a norm."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(flow.ones(width))
        self.bias = nn.Parameter(flow.zeros(width))

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Scale and shift `x` (…, width). The shape does not change."""
        return x * self.weight + self.bias


class LayerScale(nn.Module):
    """A learned factor per channel of a branch (Touvron et al. 2021).

    `ResMLP` initializes it to `start`.
    """

    def __init__(self, width: int, start: float):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(flow.ones(width))

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Scale `x` (…, width). The shape does not change."""
        return x * self.weight


class ResMLPBlock(nn.Module):
    """A linear layer over the patches of each channel, then a network over the channels of each
    patch.
    """

    def __init__(
        self, num_patches: int, width: int, inner_size: int, layer_scale: float, drop_path: float
    ):
        super().__init__()
        self.patch_norm = Affine(width)
        self.patches = nn.Linear(num_patches, num_patches)
        self.patch_scale = LayerScale(width, layer_scale)
        self.mlp_norm = Affine(width)
        self.mlp = MLPBlock(width, inner_size)
        self.mlp_scale = LayerScale(width, layer_scale)
        self.patch_drop_path, self.mlp_drop_path = DropPath(drop_path), DropPath(drop_path)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Apply the block to `x` (batch, patches, width). The shape does not change."""
        mixed = self.patches(self.patch_norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.patch_drop_path(self.patch_scale(mixed))
        return x + self.mlp_drop_path(self.mlp_scale(self.mlp(self.mlp_norm(x))))


class ResMLP(PatchClassifier):
    """A classifier for square images.

    Args:
        image_size, patch_size: side length in pixels. Patches must tile the image exactly.
        num_channels, num_classes: number of image channels and of classes.
        hidden_size, num_layers, mlp_ratio: size of the blocks.
        layer_scale: initial value of the learned factors of the branches.
        drop_path: probability of skipping a branch, the same in all blocks.
    """

    #: see `libai.models.GPT.plan`
    plan: dict[str, Any] = {
        "split": {f"blocks.*.{name}": axis for name, axis in MLP_SPLIT.items()},
        "blocks": "blocks",
        "last": ["norm", "head", "labels"],
    }

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        num_channels: int = 3,
        num_classes: int = 10,
        hidden_size: int = 384,
        num_layers: int = 12,
        mlp_ratio: float = 4.0,
        layer_scale: float = 1e-4,
        drop_path: float = 0.0,
    ):
        super().__init__(image_size, patch_size, num_channels, num_classes, hidden_size)
        check_sizes(num_layers=num_layers)
        check_range("0 < x < inf", mlp_ratio=mlp_ratio)
        sizes = (
            (image_size // patch_size) ** 2,
            hidden_size,
            int(hidden_size * mlp_ratio),
            layer_scale,
            drop_path,
        )
        self.blocks = nn.ModuleList([ResMLPBlock(*sizes) for _ in range(num_layers)])
        self.norm = Affine(hidden_size)
        self.head = nn.Linear(hidden_size, num_classes)
        init_weights(self, fan_in_std(num_layers, RESIDUAL_PROJECTIONS))
        for module in self.modules():
            if isinstance(module, LayerScale):
                module.weight.data.fill_(
                    module.start
                )  # after `init_weights`, which treats them as norm scales

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """Return the average over the patches, (batch, hidden_size)."""
        x = self.embed_patches(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(dim=1)
