"""ResNet, ResNet-18 by default (He et al. 2016), with batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.models.blocks.init import he_std, init_weights
from libai.models.blocks.outputs import classification_outputs
from libai.utils.errors import UserError
from libai.utils.sizes import check_sizes

#: see `libai.models.text.gpt.GPT_PLAN`; convolutions are not split, data parallelism is what suits this family
RESNET_PLAN: dict[str, Any] = {"split": {}, "blocks": "blocks"}


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.Module:
    """A projection where the shape changes."""
    if stride == 1 and num_in == num_out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, num_in: int, num_inner: int, stride: int):
        super().__init__()
        num_out = num_inner * self.expansion
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(num_in, num_out, stride)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """`x` (batch, num_in, height, width) to (batch, num_out, height / stride, width / stride)."""
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution of a quarter of the channels, which carries the stride, between two of 1x1, and a shortcut."""

    expansion = 4

    def __init__(self, num_in: int, num_inner: int, stride: int):
        super().__init__()
        num_out = num_inner * self.expansion
        self.conv1 = nn.Conv2d(num_in, num_inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_inner)
        self.conv2 = nn.Conv2d(num_inner, num_inner, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_inner)
        self.conv3 = nn.Conv2d(num_inner, num_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(num_in, num_out, stride)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """`x` (batch, num_in, height, width) to (batch, 4 * num_inner, height / stride, width / stride)."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


#: argument `block` of `ResNet` -> its class
BLOCKS: dict[str, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """An image classifier.

    Args:
        num_channels, num_classes: of the images and of the labels.
        width: channels of the first stage; each later stage doubles them and halves the side.
        blocks_per_stage: `(2, 2, 2, 2)` is ResNet-18, `(3, 4, 6, 3)` ResNet-34, and with bottlenecks ResNet-50.
        stem: `"imagenet"` (7x7 stride 2, then pooling) or `"cifar"` (3x3 stride 1), which keeps small images whole.
        block: `"basic"` (two 3x3 convolutions) or `"bottleneck"` (1x1, 3x3, 1x1, four times the channels).
    """

    plan = RESNET_PLAN

    def __init__(
        self,
        num_channels: int = 3,
        num_classes: int = 10,
        width: int = 64,
        blocks_per_stage: Sequence[int] = (2, 2, 2, 2),
        stem: str = "imagenet",
        block: str = "basic",
    ):
        super().__init__()
        check_sizes(num_channels=num_channels, num_classes=num_classes, width=width, blocks_per_stage=blocks_per_stage)
        if stem == "cifar":
            self.stem = nn.Sequential(
                nn.Conv2d(num_channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
            )
        elif stem == "imagenet":
            self.stem = nn.Sequential(
                nn.Conv2d(num_channels, width, 7, 2, 3, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
            )
        else:
            raise UserError(f'stem="{stem}" is not known. It is "imagenet" (7x7 and pooling) or "cifar" (3x3).')
        if block not in BLOCKS:
            raise UserError(f'block="{block}" is not known. It is one of {", ".join(BLOCKS)}.')
        kind = BLOCKS[block]
        blocks, num_in = [], width
        for stage, count in enumerate(blocks_per_stage):
            for i in range(count):
                blocks.append(kind(num_in, width * 2**stage, stride=2 if stage and i == 0 else 1))
                num_in = width * 2**stage * kind.expansion
        self.blocks = nn.ModuleList(blocks)
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Linear(num_in, num_classes)
        init_weights(self, he_std)

    def forward(self, images: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """`images` (batch, channels, height, width) float32, `labels` (batch,) int64."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.pool(x).flatten(1))
        return classification_outputs(logits, labels, self.training)
