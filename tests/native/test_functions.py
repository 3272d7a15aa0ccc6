"""Functions of single numbers, masks and comparisons against NumPy in float64, forward and backward."""

from __future__ import annotations

import math

import numpy as np
import oneflow as flow
import pytest
from native_reference import EPS, close, random, value_and_gradients
from oneflow import nn


def phi(x):
    return 0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2.0)))


def density(x):
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-np.clip(x, -700, 700)))


def silu_derivative(x, k=1.0):
    return sigmoid(k * x) * (1.0 + k * x * (1.0 - sigmoid(k * x)))


def tanh_gate(x):
    return sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * np.clip(x, -1e3, 1e3) ** 3))


def tanh_gelu_derivative(x):
    gate = tanh_gate(x)
    inner = 2.0 * math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x * x)
    return gate + x * gate * (1.0 - gate) * inner


def erf(x):
    return np.vectorize(math.erf, otypes=[float])(x)


#: operation, function, its value and derivative in NumPy
POINTWISE = {
    "gelu": (flow._C.gelu, lambda x: x * phi(x), lambda x: phi(x) + x * density(x)),
    "fast_gelu": (flow._C.fast_gelu, lambda x: x * tanh_gate(x), tanh_gelu_derivative),
    "quick_gelu": (flow._C.quick_gelu, lambda x: x * sigmoid(1.702 * x), lambda x: silu_derivative(x, 1.702)),
    "silu": (flow.nn.functional.silu, lambda x: x * sigmoid(x), silu_derivative),
    "sigmoid": (flow.sigmoid, sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
    "tanh": (flow.tanh, np.tanh, lambda x: 1.0 - np.tanh(x) ** 2),
    "exp": (flow.exp, np.exp, np.exp),
    "erf": (flow.erf, erf, lambda x: 2.0 / math.sqrt(math.pi) * np.exp(-np.minimum(x * x, 700.0))),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_functions_of_a_number(level, counted, name):
    function, value, derivative = POINTWISE[name]
    for shape in ((), (0, 3), (5, 7), (33, 1027)):
        x = np.asarray(random(*shape, spread=2.5))
        found, factors, (gradient,) = value_and_gradients(function, x)
        np.testing.assert_allclose(found, value(x.astype(np.float64)), rtol=8 * EPS, atol=4 * EPS)
        close(gradient, factors * derivative(x.astype(np.float64)))
    counted(name, f"{name}_grad")


@pytest.mark.parametrize("name", POINTWISE)
def test_functions_far_out(level, name):
    function, value, derivative = POINTWISE[name]
    x = np.float32([-1e30, -200, -103, -90, -20, -14, -13, -1e-3, -1e-30, -0.0, 0.0, 1e-30, 1e-3, 13, 14, 20, 88, 90])
    x = np.concatenate([x, np.float32([200, 1e30])])
    tensor = flow.tensor(x, requires_grad=True)
    found = function(tensor)
    found.sum().backward()
    with np.errstate(over="ignore"):
        wide = x.astype(np.float64)
        expected, expected_derivative = value(wide).astype(np.float32), np.float64(derivative(wide)).astype(np.float32)
    near = np.abs(x) < 1e-2
    np.testing.assert_allclose(found.numpy()[near], expected[near], rtol=8 * EPS, atol=1e-37)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(tensor.grad.numpy(), expected_derivative, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", POINTWISE)
def test_nan_stays_nan(level, name):
    tensor = flow.tensor([np.nan, 1.0], requires_grad=True)
    found = POINTWISE[name][0](tensor)
    found.sum().backward()
    assert np.isnan(found.numpy()).tolist() == [True, False]
    assert np.isnan(tensor.grad.numpy()).tolist() == [True, False]


def test_infinities_have_limits(level):
    ends = flow.tensor([np.inf, -np.inf])
    assert flow.exp(ends).numpy().tolist() == [np.inf, 0.0]
    for function, limits in ((flow.sigmoid, [1.0, 0.0]), (flow.tanh, [1.0, -1.0]), (flow.erf, [1.0, -1.0])):
        assert function(ends).numpy().tolist() == limits
    for name in ("gelu", "fast_gelu", "quick_gelu", "silu"):
        assert POINTWISE[name][0](ends).numpy()[0] == np.inf


@pytest.mark.parametrize("name", POINTWISE)
def test_views_and_other_types(library, name):
    function, value, _ = POINTWISE[name]
    x = random(6, 10)
    view = flow.tensor(x).transpose(0, 1)[1:7, ::2]
    close(function(view).numpy(), value(x.T[1:7, ::2].astype(np.float64)))
    before = library.calls()[name]
    np.testing.assert_allclose(function(flow.tensor(x.astype(np.float64))).numpy(), value(x.astype(np.float64)), 1e-6)
    assert library.calls()[name] == before, "float64 stays oneflow's"


@pytest.mark.parametrize("exponent", [2, 3, 2.0, 3.0, 0.5, -0.5, 1.7, -1, 4])
def test_powers(level, counted, exponent):
    x = np.abs(random(9, 33)) + np.float32(0.1)
    found, factors, (gradient,) = value_and_gradients(lambda t: t**exponent, x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found, wide**exponent, rtol=8 * EPS)
    np.testing.assert_allclose(gradient, factors * exponent * wide ** (exponent - 1), rtol=12 * EPS)
    counted("scalar_pow", "scalar_pow_grad")


def test_powers_of_negative_numbers(level):
    x = flow.tensor([-2.0, -0.0, 3.0], requires_grad=True)
    (x**3).sum().backward()
    assert x.grad.numpy().tolist() == [12.0, 0.0, 27.0] and (x**3).numpy().tolist() == [-8.0, -0.0, 27.0]


def test_roots(level, counted):
    x = np.float32([0.25, 1e-30, 1e30, 3.0])
    wide = x.astype(np.float64)
    for function, value, derivative in (
        (flow.sqrt, wide**0.5, 0.5 * wide**-0.5),
        (flow.rsqrt, wide**-0.5, -0.5 * wide**-1.5),
    ):
        with np.errstate(over="ignore"):
            derivative = derivative.astype(np.float32)
        found, factors, (gradient,) = value_and_gradients(function, x)
        np.testing.assert_allclose(found, value, rtol=8 * EPS)
        np.testing.assert_allclose(gradient, factors * derivative, rtol=8 * EPS, atol=1e-37)
    assert flow.sqrt(flow.tensor([0.0, np.inf])).numpy().tolist() == [0.0, np.inf]
    assert np.isnan(flow.sqrt(flow.tensor([-1.0])).numpy()).all() and np.isinf(flow.rsqrt(flow.zeros(1)).numpy()).all()
    counted("sqrt", "sqrt_grad", "rsqrt", "rsqrt_grad")


def test_leaky_relu(level, counted):
    x = random(5, 33)
    found, factors, (gradient,) = value_and_gradients(lambda t: nn.functional.leaky_relu(t, 0.1), x)
    np.testing.assert_array_equal(found, np.where(x > 0, x, np.float32(0.1) * x))
    close(gradient, factors * np.where(x > 0, 1.0, 0.1))
    counted("leaky_relu", "leaky_relu_grad")


@pytest.mark.parametrize("mask_shape", [(4, 5, 33), (5, 33), (4, 1, 33), (4, 5, 1)])
def test_masks(level, counted, mask_shape):
    x, y = random(4, 5, 33), random(4, 5, 33, seed=1)
    mask = random(*mask_shape, seed=2) > 0
    wide = np.broadcast_to(mask, x.shape)
    found, factors, gradients = value_and_gradients(lambda a, b: flow.where(flow.tensor(mask), a, b), x, y)
    np.testing.assert_array_equal(found, np.where(wide, x, y))
    close(gradients[0], factors * wide)
    close(gradients[1], factors * ~wide)
    found, factors, (gradient,) = value_and_gradients(lambda t: t.masked_fill(flow.tensor(mask), -np.inf), x)
    np.testing.assert_array_equal(found, np.where(wide, np.float32(-np.inf), x))
    close(gradient, factors * ~wide)
    counted("where", "masked_fill")


@pytest.mark.parametrize("name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
def test_comparisons(level, counted, name):
    operations = {"equal": flow.eq, "not_equal": flow.ne, "less": flow.lt, "less_equal": flow.le}
    operation = {**operations, "greater": flow.gt, "greater_equal": flow.ge}[name]
    x, column = np.round(random(6, 33)), np.round(random(6, 1, seed=1))
    x[0, :3] = np.nan, np.inf, -0.0
    for left, right in ((x, x), (x, column), (column, x), (x, x[:1]), (x[:0], x[:1])):
        found = operation(flow.tensor(left), flow.tensor(right))
        assert found.dtype == flow.bool
        np.testing.assert_array_equal(found.numpy(), getattr(np, name)(left, right))
    for number in (1, 1.0, -0.5, np.inf):
        np.testing.assert_array_equal(operation(flow.tensor(x), number).numpy(), getattr(np, name)(x, number))
    counted(f"broadcast_{name}", f"scalar_logical_{name}")
