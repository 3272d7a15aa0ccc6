"""preprocessor_config.json makes of image files what transformers makes of them, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai.hf.image_processor import ImageProcessor
from libai.utils.errors import UserError

#: written by make_image_fixture.py
FIXTURE = dict(np.load(Path(__file__).with_name("image_processors.npz")))
FILES: dict[str, dict[str, Any]] = json.loads(str(FIXTURE["files"]))


def read(folder: Path, fields: dict[str, Any]) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return ImageProcessor.read(folder)


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    processor = read(tmp_path, FILES[name])
    for number in range(3):
        image_module.fromarray(FIXTURE[f"image/{number}"]).save(tmp_path / "image.png")
        pixels = processor.read_image(tmp_path / "image.png")
        stride = 1 + pixels.shape[1] // 32
        assert pixels.dtype == np.float32
        np.testing.assert_allclose(pixels[:, ::stride, ::stride], FIXTURE[f"{name}/{number}"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type=CLIPImageProcessor"),
        ({"size": 16}, "image_processor_type=None"),
        ({**FILES["vit"], "do_pad": True, "pad_size": 4}, "do_pad=True, pad_size=4"),
        ({**FILES["vit"], "size": {"longest_edge": 4}}, "size={'longest_edge': 4}"),
        ({**FILES["vit"], "size": {"shortest_edge": 4}}, "without crop_size"),
        ({**FILES["vit"], "do_resize": False}, "without crop_size"),
        ({**FILES["convnext"], "size": {"height": 4, "width": 4}}, "shortest_edge"),
        ({**FILES["vit"], "resample": 9}, "9 is not a valid Resampling"),
        ({**FILES["vit"], "image_mean": [0.5]}, "three channels"),
        ({**FILES["vit"], "size": "large"}, "has no attribute"),
    ],
)
def test_what_is_not_understood_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    with pytest.raises(UserError, match="preprocessor_config.json") as caught:
        read(tmp_path, fields)
    assert message in str(caught.value) and "Give the images as arrays (.npz)" in str(caught.value)


def test_without_the_file_arrays_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has no preprocessor_config.json.*as arrays"):
        ImageProcessor.read(tmp_path)
