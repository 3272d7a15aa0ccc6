"""RMSNorm, and OneFlow's LayerNorm on the kernels in use, against NumPy in float64, in every way a layer runs."""

import numpy as np
import oneflow as flow
import pytest
from layer_checks import WAYS, relative_error, run
from oneflow import nn

from libai.layers import RMSNorm


def layer_norm_float64(x, weight, bias, grad, eps):
    """Output and gradients of layer normalisation over the last axis."""
    x, weight, bias, grad = (a.astype(np.float64) for a in (x, weight, bias, grad))
    centred = x - x.mean(-1, keepdims=True)
    scale = 1.0 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    unit, slope = centred * scale, grad * weight
    dx = (slope - slope.mean(-1, keepdims=True) - unit * (slope * unit).mean(-1, keepdims=True)) * scale
    width = x.shape[-1]
    sums = (grad * unit).reshape(-1, width).sum(0), grad.reshape(-1, width).sum(0)
    return {"y": unit * weight + bias, "x": dx, "weight": sums[0], "bias": sums[1]}


def rms_norm_float64(x, weight, grad, eps):
    """Output and gradients of root-mean-square normalisation over the last axis."""
    x, weight, grad = (a.astype(np.float64) for a in (x, weight, grad))
    scale = 1.0 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    unit, slope = x * scale, grad * weight
    dx = (slope - unit * (slope * unit).mean(-1, keepdims=True)) * scale
    return {"y": unit * weight, "x": dx, "weight": (grad * unit).reshape(-1, x.shape[-1]).sum(0)}


def make_case(shape, spread=1.0, offset=0.0):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * spread + offset
    arrays = x, rng.standard_normal(shape[-1]) + 1.0, rng.standard_normal(shape[-1]), rng.standard_normal(shape)
    return [a.astype(np.float32) for a in arrays]


def make_layer(cls, weight, bias, eps=1e-5):
    layer = cls(len(weight), eps=eps)
    layer.weight.data.copy_(flow.tensor(weight))
    if cls is not RMSNorm:
        layer.bias.data.copy_(flow.tensor(bias))
    return layer


CASES = {
    "wide": ((6, 40), 1.0, 0.0),
    "odd": ((2, 5, 13), 1.0, 0.0),
    "one row": ((1, 7), 1.0, 0.0),
    "tiny values": ((4, 24), 1e-4, 0.0),
    "huge values": ((4, 24), 1e6, 0.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_layer_norm_equals_float64(case, way):
    x, weight, bias, grad = make_case(*CASES[case])
    found = run(make_layer(nn.LayerNorm, weight, bias), x, grad, way)
    # float32 sums over up to 10 rows: a few units in the last place of the largest value
    for name, expected in layer_norm_float64(x, weight, bias, grad, 1e-5).items():
        assert relative_error(found[name], expected) < 1e-6, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_rms_norm_equals_float64(case, way):
    x, weight, bias, grad = make_case(*CASES[case])
    found = run(make_layer(RMSNorm, weight, bias), x, grad, way)
    for name, expected in rms_norm_float64(x, weight, grad, 1e-5).items():
        assert relative_error(found[name], expected) < 1e-6, name


def test_a_mean_far_from_zero_costs_no_more_digits_than_float32_loses():
    # offset / spread = 1e4: the mean itself is known to 6e-8 * 1e4 = 6e-4 of the spread; the one-pass formula gives NaN
    x, weight, bias, grad = make_case((16, 96), 0.1, 1e3)
    found = run(make_layer(nn.LayerNorm, weight, bias), x, grad, "eager")
    expected = layer_norm_float64(x, weight, bias, grad, 1e-5)
    assert relative_error(found["y"], expected["y"]) < 5e-3


def test_eps_is_used():
    x, weight, bias, grad = make_case((4, 24), 1e-2)
    found = run(make_layer(nn.LayerNorm, weight, bias, eps=0.5), x, grad, "eager")
    assert relative_error(found["y"], layer_norm_float64(x, weight, bias, grad, 0.5)["y"]) < 1e-6
    assert relative_error(found["y"], layer_norm_float64(x, weight, bias, grad, 1e-5)["y"]) > 0.1


def test_without_affine_there_are_no_parameters():
    x = flow.randn(3, 10)
    for layer in (nn.LayerNorm(10, elementwise_affine=False), RMSNorm(10, elementwise_affine=False)):
        assert list(layer.state_dict()) == []
        assert layer(x).shape == x.shape


def test_the_norm_may_be_over_several_axes():
    x = flow.randn(3, 4, 10)
    norm = RMSNorm((4, 10))
    assert list(norm.state_dict()) == ["weight"] and norm.weight.shape == (4, 10)
    assert relative_error(norm(x).numpy().reshape(3, 40), RMSNorm(40)(x.reshape(3, 40)).numpy()) < 1e-6


def test_not_a_number_stays_visible():
    for layer in (nn.LayerNorm(4), RMSNorm(4)):
        assert np.isnan(layer(flow.tensor([[1.0, np.nan, 0.0, 0.0]])).numpy()).all()


@pytest.mark.parametrize("offset", [0.0, 1e1, 1e3, 1e5, 1e7])
def test_rows_far_from_zero_and_constant_rows_stay_finite(offset):
    x = np.stack([np.full(48, offset), offset + np.arange(48) % 2]).astype(np.float32)
    layer, rows = nn.LayerNorm(48), flow.tensor(x, requires_grad=True)
    y = layer(rows)
    (y * y).sum().backward()
    assert np.isfinite(y.numpy()).all()
    assert np.isfinite(rows.grad.numpy()).all()
    if offset <= 1e5:  # beyond, float32 holds no more of the second row than its rounding
        assert np.abs(y.numpy()[1] - layer_norm_float64(x, np.ones(48), np.zeros(48), x, 1e-5)["y"][1]).max() < 0.05


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_layer_norm_with_frozen_parameters(frozen):
    x, weight, bias, grad = make_case((6, 40))
    layer, rows = make_layer(nn.LayerNorm, weight, bias), flow.tensor(x, requires_grad=True)
    for name in frozen:
        getattr(layer, name).requires_grad = False
    layer(rows).backward(flow.tensor(grad))
    expected = layer_norm_float64(x, weight, bias, grad, 1e-5)
    found = {"x": rows.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    for name, gradient in found.items():
        if name in frozen:
            assert gradient is None
        else:
            assert relative_error(gradient.numpy(), expected[name]) < 1e-6, name


def test_parameters_of_layer_norm_learn_from_an_input_without_gradient():
    x, weight, bias, grad = make_case((6, 40))
    layer = make_layer(nn.LayerNorm, weight, bias)
    layer(flow.tensor(x)).backward(flow.tensor(grad))
    expected = layer_norm_float64(x, weight, bias, grad, 1e-5)
    assert relative_error(layer.weight.grad.numpy(), expected["weight"]) < 1e-6
    assert relative_error(layer.bias.grad.numpy(), expected["bias"]) < 1e-6
