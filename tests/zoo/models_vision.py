"""Convolutional models of the zoo, as their users would write them."""

import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn


class SkipNet(nn.Module):
    """Convolutions with a skip connection around each block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1) for _ in range(2)])
        self.head = nn.Linear(6, 4)

    def forward(self, images, y):
        x = flow.relu(self.stem(images))
        for block in self.blocks:
            x = x + flow.relu(block(x))
        return {"losses": {"cls": F.cross_entropy(self.head(x.mean(dim=(2, 3))), y)}}


class UpsamplingAutoencoder(nn.Module):
    """Down by strides, up by transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, 4, 2, stride=2), nn.Tanh(), nn.Conv2d(4, 6, 2, stride=2), nn.Tanh()
        )
        self.up = nn.Sequential(
            nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Tanh(), nn.ConvTranspose2d(4, 1, 2, stride=2)
        )

    def forward(self, images):
        return {"losses": {"mse": F.mse_loss(self.up(self.down(images)), images)}}


class DepthwiseNet(nn.Module):
    """Grouped and pointwise convolutions, group normalization and average pooling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.depth, self.point = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(32, 4)

    def forward(self, images, y):
        x = self.norm(self.point(self.depth(self.stem(images))))
        x = self.pool(flow.relu(x)).flatten(1)
        return {"losses": {"cls": F.cross_entropy(self.head(x), y)}}


MODELS = {
    "transposed_convolutions": (UpsamplingAutoencoder, "images"),
    "conv_skips": (SkipNet, "labelled_images"),
    "depthwise": (DepthwiseNet, "labelled_images"),
}
