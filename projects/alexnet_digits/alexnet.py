"""AlexNet in its one-tower form (Krizhevsky 2014), sized for small images."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers import Dropout
from libai.models.blocks.init import he_std, init_weights
from libai.models.blocks.outputs import classification_outputs
from libai.utils.errors import UserError


class AlexNet(nn.Module):
    """An image classifier of five convolutions and three dense layers.

    Args: image_size: height and width in pixels, a multiple of 8 because three poolings halve it.
        num_channels: channels of the images. num_classes: number of labels. width: channels of the
        first convolution (64 in the paper); the other convolutions scale with it. hidden_size:
        units of the two dense layers (4096 in the paper). dropout: dropout probability before each
        dense layer.
    """

    #: Sharding plan. The dense layers hold most of the weights: the first is split along its
    #: outputs, the second along its inputs.
    plan = {
        "split": {"classifier.1.weight": 0, "classifier.1.bias": 0, "classifier.4.weight": 1},
        "blocks": "features",
    }

    def __init__(
        self,
        image_size: int = 32,
        num_channels: int = 3,
        num_classes: int = 10,
        width: int = 64,
        hidden_size: int = 1024,
        dropout: float = 0.5,
    ):
        super().__init__()
        if image_size % 8:
            raise UserError(
                f"image_size={image_size} is not a multiple of 8, so three poolings cannot halve "
                f"it. Resize the images to {(image_size // 8 + 1) * 8}."
            )
        channels = [num_channels, width, width * 3, width * 6, width * 4, width * 4]
        pooled_after = (0, 1, 4)
        self.features = nn.ModuleList()
        for i, (num_in, num_out) in enumerate(zip(channels, channels[1:])):
            parts: list[nn.Module] = [nn.Conv2d(num_in, num_out, 3, 1, 1), nn.ReLU()]
            if i in pooled_after:
                parts.append(nn.MaxPool2d(2, 2))
            self.features.append(nn.Sequential(*parts))
        self.classifier = nn.Sequential(
            Dropout(dropout),
            nn.Linear(channels[-1] * (image_size // 8) ** 2, hidden_size),
            nn.ReLU(),
            Dropout(dropout),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
        )
        self.head = nn.Linear(hidden_size, num_classes)
        init_weights(self, he_std)

    def forward(self, images: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """Classify `images`, (batch, channels, image_size, image_size) float32.

        `labels`: (batch,) int64.
        """
        x = images
        for layer in self.features:
            x = layer(x)
        return classification_outputs(
            self.head(self.classifier(x.flatten(1))), labels, self.training
        )
