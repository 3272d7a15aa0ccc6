"""Batch norm and biases of channels against NumPy in float64, and oneflow's own kernels where they set the rule."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from native_reference import EPS, close, random, value_and_gradients
from oneflow import nn

#: with few and with many numbers of a channel beside each other
SHAPES = [(5, 3), (600, 7), (6, 5, 9), (8, 4, 6, 7), (64, 8, 1, 1), (3, 2, 4, 5, 6), (1, 3, 5, 5)]


def norm_of(shape, **settings):
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](
        shape[1], **settings
    )
    for seed, tensor in enumerate((norm.weight, norm.bias, norm.running_mean, norm.running_var), start=5):
        if tensor is not None:
            tensor.data.copy_(flow.tensor(np.abs(random(shape[1], seed=seed)) + np.float32(0.5)))
    return norm


def over(array, axes_of):
    """One number for each channel, beside `axes_of`."""
    return array.reshape(-1, *[1] * (axes_of - 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_in_training(level, counted, shape):
    x, norm, axes = random(*shape) + np.float32(3.0), norm_of(shape), (0, *range(2, len(shape)))
    weight, bias = norm.weight.numpy().astype(np.float64), norm.bias.numpy().astype(np.float64)
    mean_before, variance_before = norm.running_mean.numpy().copy(), norm.running_var.numpy().copy()
    found, g, (gradient,) = value_and_gradients(norm, x)
    wide, count = x.astype(np.float64), x.size // shape[1]
    k = 1.0 / np.sqrt(wide.var(axes, keepdims=True) + norm.eps)
    unit = (wide - wide.mean(axes, keepdims=True)) * k
    v = g * over(weight, x.ndim)
    dx = k * (v - v.mean(axes, keepdims=True) - unit * (v * unit).mean(axes, keepdims=True))
    close(found, unit * over(weight, x.ndim) + over(bias, x.ndim), scale=16.0)
    close(gradient, dx, scale=16.0)
    close(norm.weight.grad.numpy(), (g * unit).sum(axes), scale=4.0 * count)
    close(norm.bias.grad.numpy(), g.sum(axes), scale=4.0 * count)
    close(norm.running_mean.numpy(), 0.9 * mean_before + 0.1 * wide.mean(axes))
    close(norm.running_var.numpy(), 0.9 * variance_before + 0.1 * wide.var(axes, ddof=1))
    counted("normalization", "normalization_grad")


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_in_evaluation(level, counted, shape):
    x, norm = random(*shape), norm_of(shape).eval()
    mean, variance, weight, bias = (
        over(t.numpy().astype(np.float64), x.ndim)
        for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    found, g, (gradient,) = value_and_gradients(norm, x)
    close(found, (x - mean) / np.sqrt(variance + norm.eps) * weight + bias)
    close(gradient, g * weight / np.sqrt(variance + norm.eps))
    np.testing.assert_array_equal(norm.running_mean.numpy(), mean.reshape(-1))
    counted("normalization")


@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.3}], ids=str)
def test_batch_norm_is_oneflows_with_every_setting(library, counted, settings):
    x = random(6, 5, 9)

    def results():
        norm = norm_of(x.shape, **settings)
        found, _, gradients = value_and_gradients(norm, x)
        buffers = [t.numpy() for t in (norm.running_mean, norm.running_var) if t is not None]
        return [found, *gradients, *buffers]

    ours = results()
    counted("normalization", "normalization_grad")
    library.enable(False)
    try:
        expected = results()
    finally:
        library.enable(True)
    assert len(ours) == len(expected)
    for found, wanted in zip(ours, expected):
        close(found, wanted)


def test_batch_norm_in_a_graph(library, counted):
    x, norm = random(8, 4, 6, 7), norm_of((8, 4, 6, 7))
    before = norm.running_mean.numpy().copy()
    optimizer = flow.optim.SGD(norm.parameters(), lr=0.0)

    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.norm = norm
            self.add_optimizer(optimizer)

        def build(self, t):
            y = self.norm(t)
            (y * y).sum().backward()
            return y

    expected, _, _ = value_and_gradients(norm_of(x.shape), x)
    close(Graph()(flow.tensor(x)).numpy(), expected)
    close(norm.running_mean.numpy(), 0.9 * before + 0.1 * x.astype(np.float64).mean((0, 2, 3)))
    counted("normalization", "normalization_grad")


def test_batch_norm_keeps_its_digits_beside_a_large_mean_and_its_nan(level):
    x = (random(50, 3).astype(np.float64) + 1e4).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(0)) / np.sqrt(wide.var(0) + 1e-5)
    np.testing.assert_allclose(nn.BatchNorm1d(3)(flow.tensor(x)).detach().numpy(), expected, atol=1e-3)
    x[4, 1] = np.nan
    found = nn.BatchNorm1d(3)(flow.tensor(x)).detach().numpy()
    assert np.isnan(found[:, 1]).all() and np.isfinite(found[:, [0, 2]]).all()


@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 3, 3), 1), ((4, 6, 9, 8), 1), ((5, 33), 1), ((3, 4, 5), 2)])
def test_biases_of_channels(level, counted, shape, axis):
    x, b = random(*shape), random(shape[axis], seed=2)
    found, g, gradients = value_and_gradients(lambda t, c: flow._C.bias_add(t, c, axis=axis), x, b)
    np.testing.assert_array_equal(found, x + b.reshape(-1, *[1] * (len(shape) - axis - 1)))
    np.testing.assert_allclose(gradients[0], g, rtol=EPS)
    close(gradients[1], g.sum(tuple(i for i in range(len(shape)) if i != axis)), scale=np.abs(g).sum())
    assert flow._C.bias_add(flow.zeros(0, 3, 2), flow.ones(3), axis=1).shape == (0, 3, 2)
    counted("bias_add")
