"""Split images into square patches, for models that read each patch as one vector."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai.models.blocks.outputs import classification_outputs
from libai.utils.errors import UserError
from libai.utils.sizes import check_sizes


def patches_of(images: flow.Tensor, size: int) -> flow.Tensor:
    """Convert (batch, channels, height, width) to (batch, patches, channels * size^2), in row-major
    order.

    Together with a linear layer this is a strided convolution as one matmul, which OneFlow's CPU
    kernels compute several times faster.
    """
    batch, channels, height, width = images.shape
    x = images.reshape(batch, channels, height // size, size, width // size, size)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)


def check_patches(image_size: int, patch_size: int) -> None:
    """Raise `UserError` if patches do not tile the image."""
    if image_size % patch_size:
        raise UserError(
            f"image_size={image_size} is not a multiple of patch_size={patch_size}, so patches "
            "cannot cover it exactly. patch_size can be one of "
            f"{[n for n in range(1, image_size + 1) if image_size % n == 0]}."
        )


def check_image(images: flow.Tensor, image_size: int, model: str) -> None:
    """Raise `UserError` if the images do not have the size that the model was built for."""
    height, width = images.shape[2:]
    if (height, width) != (image_size, image_size):
        raise UserError(
            f"the batch contains images of {height} x {width}, but this {model} was built with "
            f"image_size={image_size}. Resize the images, or set image_size."
        )


class PatchClassifier(nn.Module):
    """Base of classifiers that read the patches of square images.

    A model defines `features(images)`, (batch, width), and a `head` that reads them.

    Args:
        image_size, patch_size: side length in pixels. Patches must tile the image exactly.
        num_channels, num_classes: number of image channels and of classes.
        hidden_size: width of the patch embedding.
    """

    features: Any
    head: nn.Linear

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_channels: int,
        num_classes: int,
        hidden_size: int,
    ):
        super().__init__()
        check_sizes(image_size=image_size, patch_size=patch_size, hidden_size=hidden_size)
        check_sizes(num_channels=num_channels, num_classes=num_classes)
        check_patches(image_size, patch_size)
        self.image_size = image_size
        self.patch_size = patch_size
        self.patch_embedding = nn.Linear(num_channels * patch_size**2, hidden_size)

    def embed_patches(self, images: flow.Tensor) -> flow.Tensor:
        """Return the embedding of each patch, (batch, patches, hidden_size)."""
        check_image(images, self.image_size, type(self).__name__)
        return self.patch_embedding(patches_of(images, self.patch_size))

    def forward(self, images: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """Classify `images` (batch, channels, height, width) float32 with `labels` (batch,) int64.

        Returns the outputs described in `classification_outputs`. Logits are (batch, num_classes).
        """
        return classification_outputs(self.head(self.features(images)), labels, self.training)
