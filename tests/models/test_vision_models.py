"""Properties of individual vision models."""

import numpy as np
import oneflow as flow
import pytest
from refusals import refused

from libai.models import MLP, ResNet, Swin, ViT

IMAGES = np.random.RandomState(0).rand(3, 2, 8, 8).astype(np.float32)


@pytest.mark.parametrize(
    "build, text",
    [
        (lambda: ViT(8, 3), r"image_size=8 is not a multiple of patch_size=3.*\[1, 2, 4, 8\]"),
        (lambda: ResNet(stem="mnist"), r"stem='mnist' is unknown.*'imagenet' or 'cifar'"),
        (lambda: Swin(8, 1, window_size=3), r"a map of 8 x 8 patches.*window_size=3"),
        (lambda: Swin(8, 1, num_heads=(1,)), r"blocks_per_stage=\[2, 2, 6, 2\].*4 and 1 entries"),
        (lambda: ViT(16, 4, 2)(flow.tensor(IMAGES)), r"images of 8 x 8.*set image_size"),
        (
            lambda: MLP(64)(flow.tensor(IMAGES)),
            r"128 numbers per sample.*input_size=64.*input_size=128",
        ),
    ],
)
def test_impossible_sizes_are_refused(build, text):
    with refused(text):
        build()
