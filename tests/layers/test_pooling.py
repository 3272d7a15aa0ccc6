"""The mean over tokens against NumPy in float64, with its gradient, in both modes."""

import numpy as np
import oneflow as flow
import pytest
from layer_checks import WAYS, Apply, relative_error, run

from libai.layers import mean_over_tokens
from libai.models import ViT

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("way", WAYS)
def test_equals_float64_with_its_gradient(way):
    x, grad = RNG.standard_normal((4, 7, 6)).astype(np.float32), RNG.standard_normal((4, 6)).astype(np.float32)
    found = run(Apply(mean_over_tokens), x, grad, way)
    # one float32 rounding for each of the seven terms
    assert relative_error(found["y"], x.astype(np.float64).mean(1)) < 7 * 1.2e-7
    expected = np.repeat(grad[:, None].astype(np.float64) / 7, 7, axis=1)
    # in a graph the gradient is the difference of a parameter before and after an update of about its own size
    assert relative_error(found["x"], expected) < 3e-7


def test_a_sample_does_not_see_the_others():
    x = RNG.standard_normal((3, 5, 4)).astype(np.float32)
    before = mean_over_tokens(flow.tensor(x)).numpy()
    x[1] = np.nan
    after = mean_over_tokens(flow.tensor(x)).numpy()
    assert (after[[0, 2]] == before[[0, 2]]).all() and np.isnan(after[1]).all()


def test_float64_stays_float64():
    assert mean_over_tokens(flow.ones(2, 3, 4, dtype=flow.float64)).dtype == flow.float64


def test_vit_with_mean_pooling_averages_its_patches(monkeypatch):
    flow.manual_seed(0)
    vit = ViT(image_size=4, patch_size=2, num_channels=1, hidden_size=8, num_layers=1, num_heads=2, pool="mean")
    images = flow.tensor(RNG.standard_normal((2, 1, 4, 4)).astype(np.float32))
    fast = vit.features(images).numpy()
    monkeypatch.setattr("libai.models.vit.mean_over_tokens", lambda x: x.mean(dim=1))
    assert relative_error(fast, vit.features(images).numpy()) < 1e-6
