"""The vision models: what differs from one vision family to the next."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest

from libai.models import MLP, ResNet, Swin, ViT
from libai.utils.errors import UserError

IMAGES = np.random.RandomState(0).rand(3, 2, 8, 8).astype(np.float32)


def test_patches_hold_the_pixels_of_their_square() -> None:
    patches = ViT(8, 4, 2)._patches(flow.tensor(IMAGES)).numpy()
    assert patches.shape == (3, 4, 2 * 4 * 4)
    for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
        square = IMAGES[:, :, row : row + 4, column : column + 4]
        np.testing.assert_array_equal(patches[:, number], square.reshape(3, -1))


def test_patch_embedding_is_a_strided_convolution() -> None:
    model = ViT(8, 4, 2, hidden_size=16)
    weight = model.patch_embedding.weight.reshape(16, 2, 4, 4)
    expected = flow.nn.functional.conv2d(flow.tensor(IMAGES), weight, stride=4).flatten(2).transpose(1, 2)
    found = model.patch_embedding(model._patches(flow.tensor(IMAGES)))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_vit_sees_every_patch(pool: str) -> None:
    flow.manual_seed(0)
    model = ViT(8, 4, 2, hidden_size=16, num_layers=1, pool=pool).eval()
    before = model.features(flow.tensor(IMAGES)).numpy()
    for row, column in [(0, 0), (0, 4), (4, 0), (4, 4)]:
        changed = IMAGES.copy()
        changed[:, :, row, column] += 1
        assert np.abs(model.features(flow.tensor(changed)).numpy() - before).max() > 1e-6


def test_windows_are_apart_until_they_are_shifted() -> None:
    """A pixel reaches its own window in the first block, and its neighbours in the second, but not around the edge."""
    model = Swin(8, 1, 2, hidden_size=8, blocks_per_stage=(2,), num_heads=(2,), window_size=4).eval()

    def reached(num_blocks: int) -> set[tuple[int, int]]:
        maps = []
        for images in (IMAGES, changed):
            x = model.patch_embedding(flow.tensor(images).flatten(2).transpose(1, 2))
            for block in model.blocks[:num_blocks]:
                x = block(x)
            maps.append(x.numpy())
        return {divmod(place, 8) for place in np.flatnonzero((maps[0] != maps[1]).any(axis=(0, 2))).tolist()}

    changed = IMAGES.copy()
    changed[:, :, 3, 0] += 1
    assert reached(1) == {(row, column) for row in range(4) for column in range(4)}
    # windows of the second block begin at rows 2 and 6; columns 0 and 1 are at the edge, where nothing joins them to 6
    assert reached(2) == {(row, column) for row in range(6) for column in range(6)}


def test_drop_path_rises_with_depth() -> None:
    rates = [block.mlp_drop_path.p for block in ViT(8, 4, num_layers=3, drop_path=0.2).blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2])


def test_resnet18_has_the_published_size() -> None:
    # 11,689,512 with 1000 classes on 224-pixel images (He et al. 2016, as published by its implementations)
    assert sum(p.numel() for p in ResNet(num_classes=1000).parameters()) == 11_689_512


@pytest.mark.parametrize(("stem", "side"), [("cifar", 8), ("imagenet", 2)])
def test_cifar_stem_keeps_small_images_whole(stem: str, side: int) -> None:
    assert tuple(ResNet(2, width=4, stem=stem).stem(flow.tensor(IMAGES)).shape) == (3, 4, side, side)


def test_batch_norm_learns_in_training_and_rests_in_evaluation() -> None:
    flow.manual_seed(0)
    model = ResNet(2, width=4, blocks_per_stage=(1,), stem="cifar")
    means = model.stem[1].running_mean
    start = means.numpy().copy()
    model.eval()(flow.tensor(IMAGES))
    np.testing.assert_array_equal(means.numpy(), start)
    model.train()(flow.tensor(IMAGES))
    assert np.any(means.numpy() != start)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: ViT(8, 3), r"image_size=8 is not a multiple of patch_size=3.*\[1, 2, 4, 8\]"),
        (lambda: ViT(8, 4, pool="max"), r'pool="max" is not known.*"cls".*"mean"'),
        (lambda: ResNet(stem="mnist"), r'stem="mnist" is not known.*"imagenet".*"cifar"'),
        (lambda: Swin(8, 1, window_size=3), r"a map of 8 x 8 patches.*window_size=3"),
        (lambda: Swin(8, 1, num_heads=(1,)), r"blocks_per_stage=\[2, 2, 6, 2\].*4 and 1 stages"),
        (lambda: ViT(16, 4, 2)(flow.tensor(IMAGES)), r"images of 8 x 8.*set image_size"),
        (lambda: MLP(64)(flow.tensor(IMAGES)), r"128 numbers per sample.*input_size=64.*input_size=128"),
    ],
)
def test_impossible_sizes_are_refused(build, text: str) -> None:
    with pytest.raises(UserError, match=text):
        build()
