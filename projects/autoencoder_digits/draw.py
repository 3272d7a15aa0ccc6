"""Draw digits and their reconstructions as text: `python projects/autoencoder_digits/draw.py
CHECKPOINT [COUNT]`.

The file shows how to use a trained model in your own program: build the module, copy the weights
into it, and call it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from libai import checkpoint
from libai.config import LazyConfig, instantiate

SHADES = " .:-=+*#%@"


def draw(image: np.ndarray) -> list[str]:
    """Return the rows of an `(8, 8)` image in [0, 1] as text, with two characters per pixel."""
    levels = (np.clip(image, 0.0, 1.0) * (len(SHADES) - 1)).round().astype(int)
    return ["".join(SHADES[level] * 2 for level in row) for row in levels]


def main(path: str, count: int = 3) -> None:
    """Print the first `count` validation images, each next to its reconstruction by the model in
    checkpoint `path`.
    """
    import oneflow as flow

    config = LazyConfig.load(str(Path(__file__).with_name("config.py")))
    model = instantiate(config.model).eval()
    checkpoint.load_weights(path, model)
    images = instantiate(config.dataloader.test.val.dataset).images[:count]
    with flow.no_grad():
        drawn = model(images=flow.from_numpy(images))["reconstructions"].numpy().reshape(-1, 8, 8)
    for image, reconstruction in zip(images[:, 0], drawn):
        for left, right in zip(draw(image), draw(reconstruction)):
            print(f"{left}   {right}".rstrip())
        print()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
