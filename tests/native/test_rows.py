"""Softmax and layer norm against NumPy in float64, forward and backward."""

from __future__ import annotations

import math

import numpy as np
import oneflow as flow
import pytest
from native_reference import close, random, value_and_gradients
from oneflow import nn


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [(1,), (3, 1), (4, 17), (35, 23), (2, 5, 300), (70, 1000)])
def test_softmax(level, counted, shape):
    x = random(*shape, spread=4.0)
    p = softmax(x.astype(np.float64))
    found, g, (gradient,) = value_and_gradients(lambda t: flow.softmax(t, -1), x)
    close(found, p)
    close(gradient, p * (g - (p * g).sum(-1, keepdims=True)))
    found, g, (gradient,) = value_and_gradients(lambda t: flow.log_softmax(t, -1), x)
    close(found, np.log(p))
    close(gradient, g - p * g.sum(-1, keepdims=True), scale=np.abs(g).sum(-1).max())
    counted("softmax", "softmax_grad", "log_softmax", "log_softmax_grad")


def test_masked_scores_have_no_weight(level):
    x = flow.tensor([[0.0, -1e9, 1.0, -np.inf], [1e38, -1e38, 0.0, 3e38]])
    found = flow.softmax(x, -1).numpy()
    assert found[0, 1] == found[0, 3] == 0.0
    close(found, [[1 / (1 + math.e), 0, math.e / (1 + math.e), 0], [0, 0, 0, 1]])
    assert np.isnan(flow.softmax(flow.tensor([[-np.inf, -np.inf], [np.nan, 0.0], [0.0, np.nan]]), -1).numpy()).all()


def test_softmax_along_another_axis_and_of_nothing(level):
    x = random(5, 6, 7)
    expected = softmax(x.astype(np.float64).swapaxes(1, 2)).swapaxes(1, 2)
    close(flow.softmax(flow.tensor(x), 1).numpy(), expected)
    assert flow.softmax(flow.zeros(0, 4), -1).shape == (0, 4)


def norm_and_gradients(x, weight, bias, g, size):
    """In float64: the norm over the last `size` numbers, and the gradients for `g`."""
    rows, g = x.astype(np.float64).reshape(-1, size), g.reshape(-1, size)
    weight, bias = weight.astype(np.float64).reshape(-1), bias.astype(np.float64).reshape(-1)
    k = 1.0 / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    unit = (rows - rows.mean(-1, keepdims=True)) * k
    v = g * weight
    dx = k * (v - v.mean(-1, keepdims=True) - unit * (v * unit).mean(-1, keepdims=True))
    return unit * weight + bias, dx, (g * unit).sum(0), g.sum(0)


SHAPES = [((3, 1), (1,)), ((7, 33), (33,)), ((2, 9, 384), (384,)), ((3, 4, 5, 6), (5, 6))]


@pytest.mark.parametrize(("shape", "normalized"), SHAPES)
def test_layer_norm(level, counted, shape, normalized):
    check_layer_norm("eager", shape, normalized)
    counted("layer_norm", "layer_norm_grad", "layer_norm_param_grad")


def test_layer_norm_in_a_graph(library, counted):
    check_layer_norm("graph", (2, 9, 384), (384,))
    counted("layer_norm", "layer_norm_grad", "layer_norm_param_grad")


def check_layer_norm(mode, shape, normalized):
    x, size = random(*shape), math.prod(normalized)
    weight, bias, factors = random(*normalized, seed=2), random(*normalized, seed=3), random(*shape, seed=4)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(flow.tensor(x))
            self.norm = nn.LayerNorm(normalized)
            self.norm.load_state_dict({"weight": flow.tensor(weight), "bias": flow.tensor(bias)})

        def forward(self, g):
            y = self.norm(self.x)
            return y, (y * g).sum()

    model = Model()
    before = [p.numpy().copy() for p in model.parameters()]
    optimizer = flow.optim.SGD(model.parameters(), lr=1.0)

    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, g):
            y, loss = self.model(g)
            loss.backward()
            return y

    if mode == "graph":
        y = Graph()(flow.tensor(factors))
        # an update of rate 1 takes the gradient off, and loses digits where the weight is larger
        gradients = [old - p.numpy() for old, p in zip(before, model.parameters())]
    else:
        y, loss = model(flow.tensor(factors))
        loss.backward()
        gradients = [p.grad.numpy() for p in model.parameters()]
    expected_y, *expected = norm_and_gradients(x, weight, bias, factors.astype(np.float64), size)
    close(y.numpy(), expected_y.reshape(shape))
    rows = x.size // size
    for found, wanted, scale in zip(gradients, expected, (4.0 * 300, 4.0 * rows, 4.0 * rows)):
        close(found, wanted.reshape(found.shape), scale=max(scale / 100, np.abs(wanted).max(), 8.0))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("shape", "groups"), [((4, 6, 5), 3), ((2, 8, 3, 7), 8), ((3, 32, 4, 4), 1)])
def test_group_norm(level, counted, shape, groups, affine):
    x, weight, bias = random(*shape), random(shape[1], seed=2), random(shape[1], seed=3)
    norm = nn.GroupNorm(groups, shape[1], affine=affine)
    if affine:
        norm.load_state_dict({"weight": flow.tensor(weight), "bias": flow.tensor(bias)})
    else:
        weight, bias = np.ones(shape[1]), np.zeros(shape[1])
    found, g, (dx,) = value_and_gradients(norm, x)
    k = (1, shape[1], *[1] * (len(shape) - 2))
    rows, factors = x.reshape(shape[0], groups, -1), (g * weight.reshape(k)).reshape(shape[0], groups, -1)
    unit, expected, _, _ = norm_and_gradients(rows, np.ones(1), np.zeros(1), factors, rows.shape[-1])
    unit = unit.reshape(shape)
    close(found, unit * weight.reshape(k) + bias.reshape(k))
    close(dx, expected.reshape(shape), scale=max(8.0, np.abs(expected).max()))
    if affine:
        others = tuple(i for i in range(len(shape)) if i != 1)
        close(norm.weight.grad.numpy(), (g * unit).sum(others), scale=np.abs(g * unit).sum(others).max())
        close(norm.bias.grad.numpy(), g.sum(others), scale=np.abs(g).sum(others).max())
    counted("layer_norm", "layer_norm_grad")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("shape", "normalized"), [((4, 9), (9,)), ((2, 3, 4, 5), (4, 5))])
def test_layer_norm_has_gradients_of_gradients(library, shape, normalized, affine):
    """As of the formula in float64, which oneflow differentiates: of the squares of all gradients, and once more."""

    def penalties(norm, x):
        x = x.requires_grad_()
        parameters = list(norm.parameters())
        out = norm(x)
        first = flow.autograd.grad((out * out * out).sum(), [x, *parameters], create_graph=True)
        second = flow.autograd.grad(sum((g * g).sum() for g in first), [x, *parameters], create_graph=True)
        third = flow.autograd.grad(sum((g * g).sum() for g in second), [x, *parameters])
        return [[g.numpy() for g in grads] for grads in (first, second, third)]

    norm = nn.LayerNorm(normalized, eps=1e-2, elementwise_affine=affine)
    for parameter, seed in zip(norm.parameters(), (5, 6)):
        parameter.data.copy_(flow.tensor(random(*normalized, seed=seed, spread=0.5)))
    x = flow.tensor(random(*shape, spread=1.0))
    before = library.calls()["layer_norm_grad"]
    found = penalties(norm, x)
    assert library.calls()["layer_norm_grad"] > before
    expected = penalties(norm.to(flow.float64), x.detach().to(flow.float64))
    for order, tolerance in enumerate((1e-5, 1e-4, 1e-3)):  # each multiplies and adds up what came before
        for f, e in zip(found[order], expected[order]):
            np.testing.assert_allclose(f, e, rtol=0, atol=tolerance * np.abs(e).max())


def test_layer_norm_without_parameters_and_of_views(level):
    x = random(6, 40)
    ones, zeros = np.ones(40, np.float32), np.zeros(40, np.float32)
    found, g, (gradient,) = value_and_gradients(lambda t: nn.LayerNorm(40, elementwise_affine=False)(t), x)
    expected = norm_and_gradients(x, ones, zeros, g, 40)
    close(found, expected[0])
    close(gradient, expected[1], scale=16.0)
    close(nn.functional.layer_norm(flow.tensor(x.T.copy()).transpose(0, 1), (40,)).numpy(), expected[0])
    assert nn.LayerNorm(40)(flow.zeros(0, 40)).shape == (0, 40)


def test_layer_norm_keeps_its_digits_beside_a_large_mean(level):
    x = (random(5, 256).astype(np.float64) + 1e4).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(nn.LayerNorm(256)(flow.tensor(x)).detach().numpy(), expected, atol=1e-3)


def test_what_the_operation_cannot_do_stays_oneflows(library):
    """A norm of which one parameter is frozen, of float64, and with a wrong shape."""
    before = library.calls()["layer_norm"]
    norm, x = nn.LayerNorm(8), flow.tensor(random(3, 8), requires_grad=True)
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.bias.grad is not None and x.grad is not None
    assert nn.LayerNorm(8).to(flow.float64)(x.detach().to(flow.float64)).dtype == flow.float64
    with pytest.raises(RuntimeError, match="expected input with shape"):
        nn.LayerNorm(8)(flow.zeros(3, 9))
    assert library.calls()["layer_norm"] == before
