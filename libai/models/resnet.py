"""ResNet, by default ResNet-18, with batch normalization (He et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.models.blocks.init import he_std, init_weights
from libai.models.blocks.outputs import classification_outputs
from libai.utils.sizes import check_known, check_sizes


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.Module:
    """Return the identity, or a projection if the shape changes."""
    if stride == 1 and num_in == num_out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(num_in, num_out, stride)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Convert `x` (batch, num_in, height, width) to (batch, num_out, height / stride, width /
        stride).
        """
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """An image classifier.

    Args:
        num_channels: number of image channels.
        num_classes: number of classes.
        width: channels of the first stage. Each later stage doubles the channels and halves the
            side length.
        blocks_per_stage: `(2, 2, 2, 2)` is ResNet-18, `(3, 4, 6, 3)` ResNet-34.
        stem: `"imagenet"` (7x7 stride 2, then pooling) or `"cifar"` (3x3 stride 1), which keeps the
            resolution of small images.
    """

    #: see `libai.models.GPT.plan`; convolutions are not split, because data parallelism suits this
    #: family
    plan: dict[str, Any] = {"split": {}, "blocks": "blocks"}

    def __init__(
        self,
        num_channels: int = 3,
        num_classes: int = 10,
        width: int = 64,
        blocks_per_stage: Sequence[int] = (2, 2, 2, 2),
        stem: str = "imagenet",
    ):
        super().__init__()
        check_sizes(
            num_channels=num_channels,
            num_classes=num_classes,
            width=width,
            blocks_per_stage=blocks_per_stage,
        )
        check_known("stem", stem, ("imagenet", "cifar"))
        if stem == "cifar":
            self.stem = nn.Sequential(
                nn.Conv2d(num_channels, width, 3, 1, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            )
        else:
            self.stem = nn.Sequential(
                nn.Conv2d(num_channels, width, 7, 2, 3, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
            )
        self.blocks = nn.ModuleList()
        num_in = width
        for stage, count in enumerate(blocks_per_stage):
            num_out = width * 2**stage
            for i in range(count):
                self.blocks.append(BasicBlock(num_in, num_out, stride=2 if stage and i == 0 else 1))
                num_in = num_out
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Linear(num_in, num_classes)
        init_weights(self, he_std)

    def forward(self, images: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """Classify `images` (batch, channels, height, width) float32 with `labels` (batch,)
        int64.
        """
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.pool(x).flatten(1))
        return classification_outputs(logits, labels, self.training)
