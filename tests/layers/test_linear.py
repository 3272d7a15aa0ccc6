"""Linear against NumPy in float64, in every way a layer runs, and against oneflow.nn.Linear."""

import numpy as np
import oneflow as flow
import pytest
from layer_checks import WAYS, relative_error, run
from oneflow import nn

from libai.layers import Linear, linear
from libai.layers.linear import is_plain_linear


def linear_float64(x, weight, bias, grad):
    """Output and gradients of x @ weight.T + bias."""
    x, weight, bias, grad = (a.astype(np.float64) for a in (x, weight, bias, grad))
    rows, slopes = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return {"y": x @ weight.T + bias, "x": grad @ weight, "weight": slopes.T @ rows, "bias": slopes.sum(0)}


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5, 12), (7, 12), (7,), (4, 5, 7))]


def make_layer(weight, bias, cls=Linear):
    layer = cls(weight.shape[1], weight.shape[0])
    layer.weight.data.copy_(flow.tensor(weight))
    layer.bias.data.copy_(flow.tensor(bias))
    return layer


@pytest.fixture
def uses(monkeypatch):
    """The arguments of each call that writes its gradients out."""
    found, real = [], linear._with_gradients
    monkeypatch.setattr(linear, "_with_gradients", lambda *args: found.append(args) or real(*args))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_axes", [2, 3])
def test_linear_equals_float64(way, num_axes, case, uses):
    x, weight, bias, grad = case
    if num_axes == 2:
        x, grad = x[:, 0], grad[:, 0]
    found = run(make_layer(weight, bias), x, grad, way)
    for name, expected in linear_float64(x, weight, bias, grad).items():
        # sums of up to 20 float32 products
        assert relative_error(found[name], expected) < 1e-6, name
    assert uses == ([(True,)] if way == "eager" else [])


def test_state_and_initial_values_are_those_of_oneflow():
    layers = []
    for cls in (nn.Linear, Linear):
        flow.manual_seed(3)
        layers.append(cls(6, 4))
    stock, ours = (layer.state_dict() for layer in layers)
    assert list(ours) == list(stock) == ["weight", "bias"]
    assert all((ours[name].numpy() == stock[name].numpy()).all() for name in stock)
    assert list(Linear(6, 4, bias=False).state_dict()) == ["weight"]


def test_an_input_without_gradient_gets_none(case, uses):
    x, weight, bias, grad = case
    layer = make_layer(weight, bias)
    layer(flow.tensor(x)).backward(flow.tensor(grad))
    expected = linear_float64(x, weight, bias, grad)
    assert uses == [(False,)]
    for name in ("weight", "bias"):
        assert relative_error(getattr(layer, name).grad.numpy(), expected[name]) < 1e-6


def test_gradients_of_two_passes_add_up(case):
    x, weight, bias, grad = case
    layer = make_layer(weight, bias)
    for _ in range(2):
        layer(flow.tensor(x)).backward(flow.tensor(grad))
    expected = linear_float64(x, weight, bias, grad)
    assert relative_error(layer.weight.grad.numpy(), 2.0 * expected["weight"]) < 1e-6
    assert relative_error(layer.bias.grad.numpy(), 2.0 * expected["bias"]) < 1e-6


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_stays_without_gradient(frozen, case, uses):
    x, weight, bias, grad = case
    layer = make_layer(weight, bias)
    getattr(layer, frozen).requires_grad = False
    layer(flow.tensor(x)).backward(flow.tensor(grad))
    other = {"weight": "bias", "bias": "weight"}[frozen]
    assert getattr(layer, frozen).grad is None
    assert relative_error(getattr(layer, other).grad.numpy(), linear_float64(x, weight, bias, grad)[other]) < 1e-6
    assert uses == []


def test_evaluation_float64_and_no_bias_use_the_layer_of_oneflow(case, uses):
    x, weight, bias, _ = case
    layer = make_layer(weight, bias)
    with flow.no_grad():
        assert relative_error(layer(flow.tensor(x)).numpy(), x @ weight.T + bias) < 1e-6
    assert layer.to(flow.float64)(flow.tensor(x).to(flow.float64)).dtype == flow.float64
    without = Linear(12, 7, bias=False)
    assert relative_error(without(flow.tensor(x)).detach().numpy(), x @ without.weight.numpy().T) < 1e-6
    assert uses == []


def test_plain_is_neither_hooked_nor_the_users_own():
    class Own(Linear):
        pass

    hooked = Linear(2, 2)
    hooked.register_forward_hook(lambda module, inputs, output: None)
    assert is_plain_linear(Linear(2, 2)) and is_plain_linear(nn.Linear(2, 2))
    assert not any(is_plain_linear(layer) for layer in (Own(2, 2), hooked, nn.ReLU()))
