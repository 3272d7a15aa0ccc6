"""GELU against NumPy in float64, in every way a layer runs."""

import math

import numpy as np
import oneflow as flow
import pytest
from layer_checks import WAYS, Apply, run

from libai.layers.activation import GELU, gelu
from libai.utils.errors import UserError


def gelu_float64(x, approximate):
    """Value and slope."""
    x = x.astype(np.float64)
    if approximate == "none":
        cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2.0)) for v in x.ravel()]).reshape(x.shape)
        return x * cdf, cdf + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    scale = math.sqrt(2 / math.pi)
    tanh = np.tanh(scale * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * scale * (1 + 3 * 0.044715 * x**2)


def grid():
    """Odd numbers of values, from -12 to 12, dense around 0."""
    return np.concatenate([np.linspace(-12, 12, 6001), np.linspace(-0.1, 0.1, 1000)]).astype(np.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_value_and_slope_equal_float64(approximate, way):
    x = grid()
    found = run(GELU(approximate), x, np.ones_like(x), way)
    value, slope = gelu_float64(x, approximate)
    # one unit in the last place of 12 is 9.5e-7
    assert (np.abs(found["y"] - value) <= 6e-7 + 6e-8 * np.abs(value)).all()
    assert np.abs(found["x"] - slope).max() < 1.5e-6


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_as_exact_as_oneflow(approximate):
    x = grid()
    value, _ = gelu_float64(x, approximate)
    ours = np.abs(gelu(flow.tensor(x), approximate).numpy() - value).max()
    stock = np.abs(flow._C.gelu_with_approximate(flow.tensor(x), approximate).numpy() - value).max()
    assert ours <= stock + 3e-7


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_without_gradient_the_value_is_the_same(approximate):
    x = flow.tensor(grid(), requires_grad=True)
    with flow.no_grad():
        plain = gelu(x, approximate).numpy()
    assert (plain == gelu(x, approximate).detach().numpy()).all()


def test_far_values_are_exact_and_not_a_number_stays_visible():
    x = flow.tensor([-1e30, -1e8, -20.0, 0.0, 20.0, 1e8, 1e30, float("nan")], requires_grad=True)
    y = gelu(x)
    y.sum().backward()
    assert y.numpy()[:-1].tolist() == [0.0, 0.0, 0.0, 0.0, 20.0, np.float32(1e8), np.float32(1e30)]
    assert x.grad.numpy()[:-1].tolist() == [0.0, 0.0, 0.0, pytest.approx(0.5, abs=1e-6), 1.0, 1.0, 1.0]
    assert np.isnan(y.numpy()[-1])


def test_other_types_use_oneflow():
    x = flow.randn(5, dtype=flow.float64)
    assert gelu(x).dtype == flow.float64


def test_unknown_formula_is_refused():
    with pytest.raises(UserError, match='approximate="relu".*"none" or "tanh"'):
        gelu(flow.ones(1), "relu")


def test_a_shape_of_any_rank():
    for shape in [(3,), (1,), (2, 3, 4, 5)]:
        assert run(Apply(gelu), np.ones(shape, np.float32), np.ones(shape, np.float32), "eager")["y"].shape == shape
