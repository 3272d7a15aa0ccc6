"""Properties of individual vision models."""

import numpy as np
import oneflow as flow
import pytest

from libai.models import MLP, ResNet, Swin, ViT
from libai.utils.errors import UserError

IMAGES = np.random.RandomState(0).rand(3, 2, 8, 8).astype(np.float32)


def test_windows_are_apart_until_they_are_shifted():
    """A pixel reaches its own window in the first block, and its neighbours in the second, but not
    around the edge.
    """
    model = Swin(
        8, 1, 2, hidden_size=8, blocks_per_stage=(2,), num_heads=(2,), window_size=4
    ).eval()

    def reached(num_blocks):
        maps = []
        for images in (IMAGES, changed):
            x = model.patch_embedding(flow.tensor(images).flatten(2).transpose(1, 2))
            for block in model.blocks[:num_blocks]:
                x = block(x)
            maps.append(x.numpy())
        return {
            divmod(place, 8)
            for place in np.flatnonzero((maps[0] != maps[1]).any(axis=(0, 2))).tolist()
        }

    changed = IMAGES.copy()
    changed[:, :, 3, 0] += 1
    assert reached(1) == {(row, column) for row in range(4) for column in range(4)}
    # windows of the second block begin at rows 2 and 6; columns 0 and 1 are at the edge, where
    # nothing joins them to 6
    assert reached(2) == {(row, column) for row in range(6) for column in range(6)}


@pytest.mark.parametrize(
    "build, text",
    [
        (lambda: ViT(8, 3), r"image_size=8 is not a multiple of patch_size=3.*\[1, 2, 4, 8\]"),
        (lambda: ResNet(stem="mnist"), r'stem="mnist" is unknown.*"imagenet".*"cifar"'),
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
    with pytest.raises(UserError, match=text):
        build()
