"""RMSNorm equals NumPy in float64."""

import numpy as np
import oneflow as flow
import pytest

from libai.layers import RMSNorm


def rms_norm_float64(x, weight, grad, eps):
    """Output and gradients of root-mean-square normalisation over the last axis."""
    x, weight, grad = (a.astype(np.float64) for a in (x, weight, grad))
    scale = 1.0 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    unit, slope = x * scale, grad * weight
    dx = (slope - unit * (slope * unit).mean(-1, keepdims=True)) * scale
    return unit * weight, dx, (grad * unit).reshape(-1, x.shape[-1]).sum(0)


def relative_error(found, expected):
    return np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)


@pytest.mark.parametrize(
    "shape, spread", [((2, 5, 13), 1.0), ((1, 7), 1.0), ((4, 24), 1e-4), ((4, 24), 1e6)]
)
def test_rms_norm_equals_float64(shape, spread):
    """tests/parity and tests/dist compare graphs and global tensors, in models of the Llama
    family.
    """
    rng = np.random.default_rng(0)
    x, weight, grad = (
        rng.standard_normal(size).astype(np.float32) for size in (shape, shape[-1], shape)
    )
    x *= np.float32(spread)
    layer = RMSNorm(shape[-1], eps=1e-5)
    layer.weight.data.copy_(flow.tensor(weight))
    given = flow.tensor(x, requires_grad=True)
    y = layer(given)
    y.backward(flow.tensor(grad))
    expected = rms_norm_float64(x, weight, grad, 1e-5)
    for found, right in zip((y, given.grad, layer.weight.grad), expected):
        assert relative_error(found.numpy(), right) < 1e-6


def test_the_norm_may_be_over_several_axes():
    x = flow.randn(3, 4, 10)
    norm = RMSNorm((4, 10))
    assert list(norm.state_dict()) == ["weight"] and norm.weight.shape == (4, 10)
    flat = RMSNorm(40)(x.reshape(3, 40)).numpy()
    assert relative_error(norm(x).numpy().reshape(3, 40), flat) < 1e-6


def test_not_a_number_stays_visible():
    assert np.isnan(RMSNorm(4)(flow.tensor([[1.0, np.nan, 0.0, 0.0]])).numpy()).all()
