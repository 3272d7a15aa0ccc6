"""Pictures, histograms and texts of a run: what `EventStorage.put_image` and its relatives take.

Writers receive them at once, as `Media`. Scalars are in libai/engine/events/storage.py.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow

from libai.utils.errors import UserError


@dataclass(frozen=True)
class Media:
    """A picture, histogram or text of one iteration.

    Attributes:
        kind: "image", "histogram" or "text".
        tag: name, such as `val/attention`.
        iter: number of updates made, as in `LogRecord`.
        value: an image as an array (height, width, 3) of uint8; the values of a histogram as an
            array (n,) of float64; or a string.
    """

    kind: str
    tag: str
    iter: int
    value: Any


def image_array(name: str, image: Any) -> np.ndarray:
    """Return `image` as (height, width, 3) of uint8.

    `image`: tensor or array (height, width), (height, width, channels) or (channels, height, width)
    with 1, 3 or 4 channels; integers from 0 to 255, or floats from 0 to 1. A fourth channel is
    dropped. Raises `UserError` for anything else.
    """
    array = _array(image)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or array.size == 0:
        raise UserError(
            f"put_image({name!r}, ...): an image of shape {np.shape(array)}. Expected (height, "
            "width), (height, width, channels) or (channels, height, width), with 1, 3 or 4 "
            "channels."
        )
    largest = 255 if np.issubdtype(array.dtype, np.integer) else 1
    if not (array.min() >= 0 and array.max() <= largest):  # false for NaN too
        raise UserError(
            f"put_image({name!r}, ...): values from {array.min():.6g} to {array.max():.6g}. "
            "Expected integers from 0 to 255 or floats from 0 to 1: scale the image first."
        )
    if largest == 1:
        array = np.round(array * 255)
    colours = array[..., :3].astype(np.uint8)
    return np.repeat(colours, 3, axis=2) if colours.shape[2] == 1 else colours


def figure_array(name: str, figure: Any) -> np.ndarray:
    """Return a figure of matplotlib, or any object with its `savefig`, as (height, width, 3)."""
    if not hasattr(figure, "savefig"):
        raise UserError(
            f"put_figure({name!r}, ...) takes a matplotlib figure, not {type(figure).__name__}. "
            "Pass an array to put_image."
        )
    from PIL import Image

    png = io.BytesIO()
    figure.savefig(png, format="png")
    return np.asarray(Image.open(png).convert("RGB"))


def png_of(image: np.ndarray) -> bytes:
    """Return an image, (height, width, 3) of uint8, as the bytes of a PNG file."""
    from PIL import Image

    png = io.BytesIO()
    Image.fromarray(image).save(png, format="png")
    return png.getvalue()


def histogram_values(name: str, values: Any) -> np.ndarray:
    """Return the finite values of a tensor, array or list as (n,) of float64.

    Raises `UserError` if there are none.
    """
    array = np.asarray(_array(values), np.float64).ravel()
    finite = array[np.isfinite(array)]
    if finite.size == 0:
        raise UserError(
            f"put_histogram({name!r}, ...): none of {array.size} values is finite. Put values only "
            "if there are some."
        )
    return finite


def _array(value: Any) -> np.ndarray:
    return value.detach().numpy() if isinstance(value, flow.Tensor) else np.asarray(value)
