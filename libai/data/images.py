"""Image augmentation on whole batches, with random numbers that the caller owns."""

from __future__ import annotations

import numpy as np


def random_shift(images: np.ndarray, uniform: np.ndarray, max_pixels: int) -> np.ndarray:
    """Move every image by up to `max_pixels` in both directions; zeros come in from outside.

    `images` `(B, C, H, W)`; `uniform` `(B, 2)` numbers in [0, 1), one per direction. The same as padding by
    `max_pixels` and cropping at a random corner.
    """
    height, width = images.shape[2:]
    pad = max_pixels
    padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))  # type: ignore[call-overload]
    corners = (uniform * (2 * pad + 1)).astype(np.int64)
    return windows[np.arange(len(images)), :, corners[:, 0], corners[:, 1]]


def random_flip(images: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Mirror left to right the images whose number in `uniform` `(B,)` is below one half; `images` `(B, C, H, W)`."""
    return np.where((uniform < 0.5)[:, None, None, None], images[..., ::-1], images)
