"""Pooling by means against NumPy, and by maxima against oneflow's own kernels: values, places and gradients, bit
for bit."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from native_reference import close, random, value_and_gradients
from oneflow import nn

#: shape, kernel, stride, padding, dilation, ceil mode
CASES = [
    ((64, 16, 8, 8), 2, 2, 0, 1, False),
    ((3, 5, 9, 11), (3, 2), (2, 1), (1, 0), 1, False),
    ((2, 3, 12, 13), 3, 2, 1, 2, False),
    ((2, 3, 7, 7), 3, 2, 1, 1, True),
    ((2, 3, 6, 6), 3, 1, 1, 1, False),
    ((1, 1, 1, 1), 1, 1, 0, 1, False),
]


def stock(library, run):
    library.enable(False)
    try:
        return run()
    finally:
        library.enable(True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_maxima_of_images(library, counted, case):
    shape, kernel, stride, padding, dilation, ceil_mode = case
    x = np.round(random(*shape) * 4) / 4  # with equal numbers
    x.reshape(-1)[::17] = np.nan
    pool = nn.MaxPool2d(kernel, stride, padding, dilation, return_indices=True, ceil_mode=ceil_mode)
    places = pool(flow.tensor(x))[1].numpy()
    found, _, (gradient,) = value_and_gradients(lambda t: pool(t)[0], x)
    counted("max_pool_2d", "max_pool_2d_grad")
    expected, _, (expected_gradient,) = stock(library, lambda: value_and_gradients(lambda t: pool(t)[0], x))
    np.testing.assert_array_equal(places, stock(library, lambda: pool(flow.tensor(x))[1].numpy()))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(gradient, expected_gradient)
    assert np.isnan(found).any() or x.size == 1 or len(found) == 64


def test_maxima_of_sequences_of_views_and_of_nothing(library, counted):
    x, pool = random(6, 4, 9), nn.MaxPool1d(3, 2, 1)
    found = pool(flow.tensor(x).permute(2, 1, 0)).numpy()
    padded = np.pad(x.T, [(0, 0), (0, 0), (1, 1)], constant_values=-np.inf)
    np.testing.assert_array_equal(found, np.stack([padded[..., i : i + 3].max(-1) for i in (0, 2, 4)], -1))
    assert nn.MaxPool2d(2)(flow.zeros(0, 3, 4, 4)).shape == (0, 3, 2, 2)
    counted("max_pool_1d")


def test_maxima_in_a_graph(library, counted):
    x = random(4, 3, 8, 8)
    model = nn.Sequential(nn.MaxPool2d(2))
    model.weight = weight = nn.Parameter(flow.tensor(x))
    optimizer = flow.optim.SGD([weight], lr=1.0)

    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self):
            y = self.model(self.model.weight * 1.0)
            y.sum().backward()
            return y

    expected = x.reshape(4, 3, 4, 2, 4, 2).max((3, 5))
    np.testing.assert_array_equal(Graph()().numpy(), expected)
    changed = (x - weight.numpy()).reshape(4, 3, 4, 2, 4, 2).sum((3, 5))
    np.testing.assert_allclose(changed, 1.0, rtol=1e-5)
    counted("max_pool_2d", "max_pool_2d_grad")


MEANS = [
    ((16, 8, 8, 8), nn.AvgPool2d(2)),
    ((3, 5, 9, 11), nn.AvgPool2d((3, 2), (2, 1), (1, 0))),
    ((2, 3, 7, 8), nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
    ((2, 3, 7, 8), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    ((2, 3, 7, 8), nn.AvgPool2d(3, 2, 1, divisor_override=5)),
    ((2, 3, 7, 8), nn.AdaptiveAvgPool2d((1, 1))),
    ((2, 3, 7, 8), nn.AdaptiveAvgPool2d((3, 5))),
    ((2, 3, 2, 2), nn.AdaptiveAvgPool2d((3, 4))),
]


@pytest.mark.parametrize(("shape", "pool"), MEANS, ids=str)
def test_means_of_images(library, counted, shape, pool):
    """As oneflow's own kernels in float64, and linear: the gradient is that of float64 too."""
    x = random(*shape)
    found, factors, (gradient,) = value_and_gradients(pool, x)
    wide = flow.tensor(x.astype(np.float64), requires_grad=True)
    expected = pool(wide)
    (expected * flow.tensor(factors)).sum().backward()
    close(found, expected.numpy())
    close(gradient, wide.grad.numpy())
    name = "adaptive_avg_pool2d" if isinstance(pool, nn.AdaptiveAvgPool2d) else "avg_pool_2d"
    counted(name, f"{name}_grad")


def test_a_mean_of_an_image_is_numpys(library):
    x = random(2, 3, 6, 8)
    close(nn.AvgPool2d(2)(flow.tensor(x)).numpy(), x.astype(np.float64).reshape(2, 3, 3, 2, 4, 2).mean((3, 5)))
    close(nn.AdaptiveAvgPool2d((1, 1))(flow.tensor(x)).numpy()[..., 0, 0], x.astype(np.float64).mean((2, 3)))
    assert nn.AvgPool2d(2)(flow.zeros(0, 3, 4, 4)).shape == (0, 3, 2, 2)
