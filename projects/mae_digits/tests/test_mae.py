"""MAE: the patches that it sees, its predictions, and the ViT that starts from its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mae import MAE

from libai.layers import assign_layer_ids, random_context
from libai.models import ViT
from libai.utils.errors import UserError

IMAGES = np.random.RandomState(0).rand(6, 1, 8, 8).astype(np.float32)


def build(**sizes: Any) -> MAE:
    flow.manual_seed(1)
    model = MAE(8, 2, 1, 16, 2, 2, 2.0, 8, 1, 2, 2.0, **sizes)
    assign_layer_ids(model)
    return model


def loss_of(model: MAE, **inputs: Any) -> float:
    outputs = model(
        **{name: flow.tensor(array) for name, array in {"images": IMAGES, **inputs}.items()}
    )
    return outputs["losses"]["reconstruction"].item()


def drawn(key: int, data_rank: int = 0, size: int = 6) -> np.ndarray:
    """Return the visible patches of each sample."""
    model = build()
    with random_context(key, data_rank):
        noise = model.noise(flow.zeros(size, 16)).numpy()
    return np.sort(np.argsort(noise, axis=1)[:, : model.num_kept], axis=1)


@pytest.mark.parametrize("normalizes", [False, True])
def test_the_loss_is_the_mean_over_hidden_patches(normalizes: bool) -> None:
    model = build(normalizes_patches=normalizes).eval()
    noise = np.random.RandomState(1).rand(6, 16).astype(np.float32)
    predicted = model(flow.tensor(IMAGES), flow.tensor(noise))["logits"].numpy()
    targets = IMAGES.reshape(6, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(6, 16, 4)
    if normalizes:
        targets = targets - targets.mean(-1, keepdims=True)
        targets /= np.sqrt(targets.var(-1, ddof=1, keepdims=True) + 1e-6)
    hidden = noise.argsort(axis=1).argsort(axis=1) >= 4
    assert loss_of(model, noise=noise) == pytest.approx(
        ((predicted - targets) ** 2)[hidden].mean(), rel=1e-5
    )


def test_hidden_patches_are_not_seen() -> None:
    model = build().eval()
    noise = np.tile(np.arange(16, dtype=np.float32), (6, 1))
    changed = IMAGES.copy()
    changed[:, :, 7, 7] += 1  # in the last patch
    logits = [
        model(flow.tensor(images), flow.tensor(noise))["logits"].numpy()
        for images in (IMAGES, changed)
    ]
    np.testing.assert_array_equal(*logits)
    changed[:, :, 0, 0] += 1
    assert np.any(model(flow.tensor(changed), flow.tensor(noise))["logits"].numpy() != logits[0])


def test_masks_belong_to_the_key_and_to_the_sample() -> None:
    seen = drawn(1)
    assert len({tuple(row) for row in seen.tolist()}) == 6
    np.testing.assert_array_equal(drawn(1), seen)
    np.testing.assert_array_equal(drawn(1, data_rank=1, size=3), seen[3:])
    assert np.any(drawn(2) != seen)
    counts = np.bincount(drawn(3, size=2000).reshape(-1), minlength=16)
    assert abs(counts / 500 - 1).max() < 0.2  # each of 16 patches in a quarter of the samples


def test_evaluation_masks_alike_and_draws_nothing() -> None:
    model = build()
    assert loss_of(model) != loss_of(model)
    model.eval()
    assert loss_of(model) == loss_of(model)


def test_a_vit_takes_the_encoder() -> None:
    mae = build()
    vit = ViT(8, 2, 1, 10, 16, 2, 2, 2.0)
    mine, its = mae.state_dict(), vit.state_dict()
    assert {name for name in its if name not in mine or mine[name].shape != its[name].shape} == {
        "head.weight",
        "head.bias",
    }


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="mask_ratio=0.99 keeps 0 of 16 patches"):
        build(mask_ratio=0.99)
    with pytest.raises(UserError, match="width of 18.*multiple of 4"):
        MAE(8, 2, 1, 18, 1, 2)
