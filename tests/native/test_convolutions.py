"""Convolutions of 1 to 3 axes and their gradients against NumPy in float64."""

from __future__ import annotations

import itertools

import numpy as np
import oneflow as flow
import pytest
from native_reference import close, random, value_and_gradients
from oneflow import nn

FUNCTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}

#: input, filter, stride, padding, dilation, groups
CASES = [
    ((3, 5, 9, 7), (6, 5, 3, 3), 1, 1, 1, 1),
    ((2, 4, 8, 9), (40, 4, 3, 3), 2, 1, 1, 1),
    ((2, 3, 11, 11), (33, 3, 5, 5), 3, 2, 2, 1),
    ((70, 8, 2, 2), (8, 8, 3, 3), 1, 1, 1, 1),  # more samples than are computed at a time when images are larger
    ((3, 2, 33, 40), (17, 2, 3, 3), 1, 0, 1, 1),
    ((3, 300, 4, 4), (20, 300, 3, 3), 1, 1, 1, 1),  # more channels than are summed at a time
    ((5, 64, 1, 1), (32, 64, 3, 3), 1, 1, 1, 1),  # eight of nine taps see no input
    ((2, 16, 7, 7), (16, 16, 1, 1), 2, 0, 1, 1),  # three of four inputs are read by no output
    ((2, 3, 5, 5), (4, 3, 2, 2), 4, 0, 1, 1),
    ((2, 8, 5, 5), (8, 2, 3, 3), 2, 1, 1, 4),
    ((2, 6, 5, 5), (6, 1, 3, 3), 1, 1, 1, 6),
    ((1, 1, 3, 3), (1, 1, 3, 3), 1, 3, 1, 1),  # outputs that see no input
    ((2, 4, 9), (5, 4, 3), 2, 1, 1, 1),
    ((2, 3, 5, 6, 7), (4, 3, 2, 3, 2), 1, 1, 1, 1),
]


def convolve(x, w, stride, padding, dilation, groups, g):
    """The output, and the gradients of `x` and `w` for the gradient `g` (or of ones), tap by tap."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    axes = x.ndim - 2
    padded = np.pad(x, [(0, 0), (0, 0)] + [(padding, padding)] * axes)
    out = [(padded.shape[2 + i] - dilation * (w.shape[2 + i] - 1) - 1) // stride + 1 for i in range(axes)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    g = np.ones_like(y) if g is None else g
    dx, dw = np.zeros_like(padded), np.zeros_like(w)
    c, o = w.shape[1], w.shape[0] // groups
    for group, tap in itertools.product(range(groups), itertools.product(*map(range, w.shape[2:]))):
        window = tuple(slice(k * dilation, k * dilation + stride * (n - 1) + 1, stride) for k, n in zip(tap, out))
        inputs = (slice(None), slice(group * c, (group + 1) * c), *window)
        outputs = slice(group * o, (group + 1) * o)
        weight = (outputs, slice(None), *tap)
        y[:, outputs] += np.einsum("nc...,oc->no...", padded[inputs], w[weight])
        dx[inputs] += np.einsum("no...,oc->nc...", g[:, outputs], w[weight])
        dw[weight] += np.einsum(
            "nop,ncp->oc", g[:, outputs].reshape(len(x), o, -1), padded[inputs].reshape(len(x), c, -1)
        )
    inner = tuple(slice(padding, padding + n) for n in x.shape[2:])
    return y, dx[(slice(None), slice(None), *inner)], dw


def of_sum(sums, terms):
    """The largest rounding that float32 adds up to, which is rounded once for each term."""
    return max(1.0, np.abs(sums).max() * max(1.0, np.sqrt(terms) / 8))


def check(function, x, w, b, *settings):
    found, g, gradients = value_and_gradients(function, x, w, b)
    y, dx, dw = convolve(x, w, *settings, g)
    close(found, y + b.reshape(-1, *[1] * (x.ndim - 2)).astype(np.float64), scale=of_sum(y, w[0].size))
    close(gradients[0], dx, scale=of_sum(dx, w[:, 0].size))
    close(gradients[1], dw, scale=of_sum(dw, g[:, 0].size))
    close(gradients[2], g.sum((0, *range(2, x.ndim))), scale=np.abs(g).sum() / len(b) / 8 + 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolutions(level, counted, case):
    x_shape, w_shape, *settings = case
    x, w, b = random(*x_shape), random(*w_shape, seed=2, spread=0.5), random(w_shape[0], seed=3)
    stride, padding, dilation, groups = settings
    function = FUNCTIONS[x.ndim - 2]
    check(lambda t, f, c: function(t, f, c, stride, padding, dilation, groups), x, w, b, *settings)
    counted(f"conv{x.ndim - 2}d", "conv_data_grad", "conv_filter_grad", "bias_add")


def test_a_convolution_of_views_and_of_nothing(level, counted):
    x, w, b = random(9, 7, 5, 3), random(6, 5, 3, 3, seed=2), random(6, seed=3)
    view = np.ascontiguousarray(x.transpose(3, 2, 1, 0))
    found = nn.functional.conv2d(flow.tensor(x).permute(3, 2, 1, 0), flow.tensor(w), flow.tensor(b), padding=1)
    close(found.numpy(), convolve(view, w, 1, 1, 1, 1, None)[0] + b.reshape(-1, 1, 1).astype(np.float64))
    counted("conv2d")
    nothing = flow.zeros(0, 5, 7, 9)
    assert nn.functional.conv2d(nothing, flow.tensor(w), padding=1).shape == (0, 6, 7, 9)


def test_nan_and_inf_reach_the_pixels_that_see_them(level):
    x = np.zeros((1, 1, 5, 5), np.float32)
    x[0, 0, 0, 0], x[0, 0, 4, 4] = np.nan, np.inf
    found = nn.functional.conv2d(flow.tensor(x), flow.ones(1, 1, 3, 3), padding=1).numpy()[0, 0]
    assert np.isnan(found[:2, :2]).all() and np.isinf(found[3:, 3:]).all()
    assert (found[2, 2], np.isfinite(found).sum()) == (0.0, 25 - 8)


def test_a_convolution_in_a_graph(library, counted):
    x, w = random(4, 3, 8, 8), random(10, 3, 3, 3, seed=2, spread=0.5)
    conv = nn.Conv2d(3, 10, 3, padding=1)
    with flow.no_grad():
        conv.weight.copy_(flow.tensor(w))
        conv.bias.zero_()
    optimizer = flow.optim.SGD(conv.parameters(), lr=1.0)

    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.conv = conv
            self.add_optimizer(optimizer)

        def build(self, t):
            y = self.conv(t)
            y.sum().backward()
            return y

    y, _, dw = convolve(x, w, 1, 1, 1, 1, None)
    close(Graph()(flow.tensor(x)).numpy(), y)
    close(w - conv.weight.numpy(), dw)
    counted("conv2d", "conv_filter_grad")


def test_channels_last_and_float64_stay_oneflows(library):
    before = library.calls()["conv2d"]
    x, w = random(2, 3, 5, 5), random(4, 3, 3, 3, seed=2)
    expected = convolve(x, w, 1, 0, 1, 1, None)[0]
    wide = nn.functional.conv2d(flow.tensor(x.astype(np.float64)), flow.tensor(w.astype(np.float64)))
    np.testing.assert_allclose(wide.numpy(), expected, rtol=1e-12)
    last = [flow.tensor(np.ascontiguousarray(a.transpose(0, 2, 3, 1))) for a in (x, w)]
    assert flow._C.conv2d(*last, channel_pos="channels_last").shape == (2, 3, 3, 4)
    assert library.calls()["conv2d"] == before
    close(nn.functional.conv2d(flow.tensor(x), flow.tensor(w)).numpy(), expected)
    assert library.calls()["conv2d"] == before + 1, "an operation may go back to ours"
