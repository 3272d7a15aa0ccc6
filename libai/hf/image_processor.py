"""How files of images become the numbers that a model of Hugging Face takes: preprocessor_config.json as data."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.vision.files import import_pillow, open_image
from libai.utils.errors import UserError

_NAME = "preprocessor_config.json"
#: what is done where the file says nothing, as in transformers
_ALWAYS: dict[str, Any] = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_ALWAYS |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_center_crop": False, "do_convert_rgb": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {**_ALWAYS, "resample": 2, "size": 224, "crop_size": None},
    "ConvNext": {**_ALWAYS, "resample": 3, "size": 384, "crop_size": None, "crop_pct": 224 / 256},
}
#: of the file itself, or of how transformers returns what it computes
_WITHOUT_EFFECT = {"image_processor_type", "feature_extractor_type", "processor_class", "_valid_processor_keys"}
_WITHOUT_EFFECT |= {"return_tensors", "device", "disable_grouping", "default_to_square"}


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes, cuts out the middle, rescales and normalises as the image processors of ViT and ConvNeXt, with which
    Swin and ResNet are published too, do with Pillow."""

    #: (height, width), or that of the shorter side; None leaves the image as it is
    size: tuple[int, int] | int | None
    resample: int
    crop: tuple[int, int] | None
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, folder: str | os.PathLike) -> ImageProcessor:
        """From a Hugging Face folder; raises `UserError` unless each of the file's fields is understood."""
        path = Path(folder) / _NAME
        if not path.is_file():
            raise UserError(
                f"{folder} does not say how files of images become numbers: it has no {_NAME}. Put the model's beside "
                "its weights, or give the images as arrays (.npz)."
            )
        try:
            return cls._of(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} was asked how files of images become numbers, and says something that is not supported: "
                f"{error}. Give the images as arrays (.npz)."
            ) from error

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> ImageProcessor:
        name = str(fields.get("image_processor_type") or fields.get("feature_extractor_type"))
        kind = re.fullmatch(r"(ViT|ConvNext)(FeatureExtractor|ImageProcessor)(Fast|Pil)?", name)
        if kind is None:
            raise ValueError(f"image_processor_type={name} (known: ViTImageProcessor, ConvNextImageProcessor)")
        defaults = _DEFAULTS[kind[1]]
        unknown = sorted(
            f"{key}={value!r}"
            for key, value in fields.items()
            if key not in _WITHOUT_EFFECT | defaults.keys()
            and value not in (None, False)
            and (key, value) != ("data_format", "channels_first")
        )
        if unknown:
            raise ValueError(", ".join(unknown))
        used = defaults | {key: value for key, value in fields.items() if value is not None}
        return cls._of_kind(kind[1], used)

    @classmethod
    def _of_kind(cls, kind: str, used: dict[str, Any]) -> ImageProcessor:
        size = _size(used["size"], is_square=kind == "ViT") if used["do_resize"] else None
        crop = _size(used["crop_size"], is_square=True) if used["do_center_crop"] else None
        if isinstance(crop, int):
            raise ValueError(f"crop_size={used['crop_size']!r}")
        if kind == "ConvNext" and size is not None:
            if not isinstance(size, int):
                raise ValueError(f"size={used['size']!r} (ConvNextImageProcessor has a shortest_edge)")
            if size >= 384:
                size = (size, size)
            else:
                size, crop = int(size / used["crop_pct"]), crop or (size, size)
        if crop is None and not isinstance(size, tuple):
            raise ValueError(f"size={used['size']!r} without crop_size (images of one batch would differ in size)")
        mean, std = (used["image_mean"], used["image_std"]) if used["do_normalize"] else ([0.0] * 3, [1.0] * 3)
        if len(mean) != 3 or len(std) != 3:
            raise ValueError(f"image_mean={mean!r}, image_std={std!r} (three channels are supported)")
        factor = float(used["rescale_factor"]) if used["do_rescale"] else 1.0
        resample = int(import_pillow().Resampling(used["resample"]))
        return cls(size, resample, crop, factor, tuple(mean), tuple(std))

    def read_image(self, path: str | os.PathLike) -> np.ndarray:
        """An image of a file as the model takes it, float32 `(3, height, width)`."""
        image = open_image(path)
        if self.size is not None:
            image = image.resize(self._resized(*image.size), self.resample)
        if self.crop is not None:
            height, width = self.crop
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        pixels = np.asarray(image, np.float32) * np.float32(self.factor)
        return ((pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)).transpose(2, 0, 1)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        assert self.size is not None
        shorter = min(width, height)
        return int(self.size * width / shorter), int(self.size * height / shorter)


def _size(value: Any, is_square: bool) -> tuple[int, int] | int:
    """Of a number, {"height": …, "width": …} or {"shortest_edge": …}."""
    if isinstance(value, int):
        return (value, value) if is_square else value
    if value.keys() == {"height", "width"}:
        return value["height"], value["width"]
    if value.keys() == {"shortest_edge"}:
        return value["shortest_edge"]
    raise ValueError(f"size={value!r}")
