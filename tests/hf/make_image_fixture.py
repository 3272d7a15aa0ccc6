"""Makes `image_processors.npz`: random images, and what the image processors of `transformers` make of them.

Run with the Python of an environment that has PyTorch, transformers (5.23 made what is here) and Pillow (12.3):
python tests/hf/make_image_fixture.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoImageProcessor

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
#: preprocessor_config.json as the folders of published models have it, of smaller images
FILES = {
    "vit": {"feature_extractor_type": "ViTFeatureExtractor", "size": 16, "resample": 2, "do_normalize": True},
    "swin": {
        "image_processor_type": "ViTImageProcessorFast",
        "size": {"height": 16, "width": 20},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 0.00392156862745098,
        "do_center_crop": None,
        "data_format": "channels_first",
        **IMAGENET,
    },
    "vit_crop": {
        "image_processor_type": "ViTImageProcessor",
        "size": {"shortest_edge": 15},
        "do_center_crop": True,
        "crop_size": {"height": 12, "width": 18},
        "do_normalize": False,
    },
    "crop_only": {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": False,
        "do_rescale": False,
        "do_center_crop": True,
        "crop_size": {"height": 21, "width": 21},
        **IMAGENET,
    },
    "resnet": {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 17, "crop_pct": 0.875, **IMAGENET},
    "convnext": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}, "resample": 3},
}


def process(fields: dict, image: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(fields))
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor(image, return_tensors="np")["pixel_values"][0]


if __name__ == "__main__":
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in ((23, 31), (40, 17), (16, 16))]
    arrays = {f"image/{i}": image for i, image in enumerate(images)}
    for name, fields in FILES.items():
        for i, image in enumerate(images):
            pixels = process(fields, image)
            stride = 1 + pixels.shape[1] // 32  # some pixels of the large ones
            arrays[f"{name}/{i}"] = pixels[:, ::stride, ::stride]
    arrays["files"] = np.array(json.dumps(FILES))
    np.savez_compressed(Path(__file__).with_name("image_processors.npz"), **arrays)
