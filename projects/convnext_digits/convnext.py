"""ConvNeXt: depthwise 7 x 7 convolutions and an MLP at each position (Liu et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import oneflow as flow
from oneflow import nn

from libai.layers import DropPath
from libai.models.blocks.init import fan_in_std, init_weights
from libai.models.blocks.patches import PatchClassifier
from libai.models.blocks.transformer import MLP_SPLIT, RESIDUAL_PROJECTIONS, MLPBlock, linear_rates
from libai.models.resmlp import LayerScale
from libai.utils.errors import UserError


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution followed by an MLP at each position, with a shortcut around both."""

    def __init__(self, width: int, layer_scale: float, drop_path: float):
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLPBlock(width, 4 * width)
        self.scale = LayerScale(width, layer_scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Return a tensor of the shape of `x`, (batch, height, width, channels)."""
        branch = self.convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.drop_path(self.scale(self.mlp(self.norm(branch))))


class Downsampling(nn.Module):
    """Merge each 2 x 2 block of positions into one, as a 2 x 2 convolution with stride 2, by a
    single matmul.
    """

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.norm = nn.LayerNorm(num_in, eps=1e-6)
        self.projection = nn.Linear(4 * num_in, num_out)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Map (batch, height, width, num_in) to (batch, height / 2, width / 2, num_out)."""
        batch, height, width, channels = x.shape
        x = self.norm(x).reshape(batch, height // 2, 2, width // 2, 2, channels)
        return self.projection(
            x.permute(0, 1, 3, 5, 2, 4).reshape(batch, height // 2, width // 2, 4 * channels)
        )


class ConvNeXt(PatchClassifier):
    """A classifier of square images.

    Args: image_size, patch_size: height and width in pixels; patches tile the image, and each later
        stage halves the map. num_channels: channels of the images. num_classes: number of labels.
        widths, blocks_per_stage: channels and number of blocks of each stage. layer_scale: initial
        value of the learned factors of the branches. drop_path: probability of skipping the branch
        of the last block; it rises linearly from 0 in the first block.
    """

    #: Sharding plan: the axis on which each weight is split, and the blocks at which pipeline
    #: stages can begin.
    plan = {
        "split": {f"blocks.*.{name}": axis for name, axis in MLP_SPLIT.items()},
        "blocks": "blocks",
        "last": ["norm", "head", "labels"],
    }

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 4,
        num_channels: int = 3,
        num_classes: int = 10,
        widths: Sequence[int] = (96, 192, 384, 768),
        blocks_per_stage: Sequence[int] = (3, 3, 9, 3),
        layer_scale: float = 1e-6,
        drop_path: float = 0.0,
    ):
        super().__init__(image_size, patch_size, num_channels, num_classes, widths[0])
        halvings = len(widths) - 1
        if len(widths) != len(blocks_per_stage) or image_size // patch_size % 2**halvings:
            raise UserError(
                f"widths={list(widths)} and blocks_per_stage={list(blocks_per_stage)} must have "
                "one number for each stage, and image_size / "
                f"patch_size={image_size // patch_size} must be a multiple of {2**halvings}, "
                "because each stage but the first halves the map."
            )
        self.embedding_norm = nn.LayerNorm(widths[0], eps=1e-6)
        rates = iter(linear_rates(drop_path, sum(blocks_per_stage)))
        blocks: list[nn.Module] = []
        for stage, (width, count) in enumerate(zip(widths, blocks_per_stage)):
            if stage:
                blocks.append(Downsampling(widths[stage - 1], width))
            blocks += [ConvNeXtBlock(width, layer_scale, next(rates)) for _ in range(count)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], num_classes)
        init_weights(self, fan_in_std(sum(blocks_per_stage), RESIDUAL_PROJECTIONS))
        for module in self.modules():
            if isinstance(module, LayerScale):
                module.weight.data.fill_(
                    module.start
                )  # after `init_weights`, which treats them as scales of norms

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """Return the mean over the last feature map, (batch, channels of the last stage)."""
        side = self.image_size // self.patch_size
        x = self.embedding_norm(self.embed_patches(images))
        x = x.reshape(x.shape[0], side, side, -1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.mean(dim=(1, 2)))
