"""Split images into square patches, for models that read each patch as one vector."""

from __future__ import annotations

import oneflow as flow

from libai.utils.errors import UserError


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
