"""Broadcasts, sums, copies of views and transposes against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import oneflow as flow
import pytest
from native_reference import EPS, close, random, value_and_gradients
from oneflow import nn

PAIRS = [
    *(((4, 5, 6), (6,)), ((4, 5, 6), (5, 1)), ((4, 5, 6), (4, 1, 1)), ((4, 1, 6), (1, 5, 1)), ((4, 5, 6), (4, 5, 6))),
    *(((1,), (3, 4)), ((2, 1, 3, 1, 5), (1, 4, 1, 6, 1)), ((7,), ()), ((300, 96), (300, 1)), ((0, 3), (1, 3))),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_arithmetic_is_numpys_bit_for_bit(level, left, right):
    x, y = random(*left), np.asarray(random(*right, seed=1)) + np.float32(5.0)
    for function in (np.add, np.subtract, np.multiply, np.divide):
        operation = {"add": flow.add, "subtract": flow.sub, "multiply": flow.mul, "divide": flow.div}[function.__name__]
        np.testing.assert_array_equal(operation(flow.tensor(x), flow.tensor(y)).numpy(), function(x, y))
        np.testing.assert_array_equal(operation(flow.tensor(y), flow.tensor(x)).numpy(), function(y, x))


def test_arithmetic_in_place(level, counted):
    x, row, column = random(8, 6), random(6, seed=1), random(8, 1, seed=2)
    tensor = flow.tensor(x.copy())
    tensor += flow.tensor(row)
    tensor *= flow.tensor(column)
    np.testing.assert_array_equal(tensor.numpy(), (x + row) * column)
    counted("broadcast_add", "broadcast_mul")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_sum_of_tensors_is_numpys_bit_for_bit(level, counted, count):
    terms = [random(13, 7, seed=seed) for seed in range(count)]
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    np.testing.assert_array_equal(flow._C.add([flow.tensor(term) for term in terms]).numpy(), expected)
    tensor = flow.tensor(terms[0])
    for term in terms[1:]:
        tensor += flow.tensor(term)
    np.testing.assert_array_equal(tensor.numpy(), expected)
    counted("add_n")


AXES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (-1,), (0, -1)]


@pytest.mark.parametrize("shape", [(5, 7, 9), (5, 1, 9), (40, 3, 300), (2, 0, 3), (1, 1, 1)])
def test_sums(level, counted, shape):
    x = random(*shape)
    for axes, keepdim in itertools.product(AXES, (False, True)):
        found = flow.tensor(x).sum(axes, keepdim)
        close(found.numpy(), x.astype(np.float64).sum(axes, keepdims=keepdim), scale=np.abs(x).sum() / 8 + 1)
    counted("reduce_sum")


def test_sums_of_gradients(level, counted):
    x, row = random(5, 7, 9), random(7, 1, seed=1)
    _, factors, (_, gradient) = value_and_gradients(flow.mul, x, row)
    close(gradient, (factors * x).sum((0, 2)).reshape(7, 1), scale=100.0)
    counted("reduce_sum_like")


def test_gradients_of_sums_and_means(level, counted):
    x = random(5, 7, 9)
    for axes, keepdim in itertools.product([*AXES, None], (False, True)):
        if axes is None and keepdim:
            continue
        kept = (lambda t, a=axes, k=keepdim: t.mean(a, k)) if axes else (lambda t: t.mean())
        found, factors, (gradient,) = value_and_gradients(kept, x)
        count = x.size / max(found.size, 1)
        shape = np.mean(x, axes, keepdims=True).shape
        close(gradient, np.broadcast_to(factors.reshape(shape) / count, x.shape))
    counted("broadcast_like")


def test_a_long_sum_keeps_its_digits(level):
    x = np.random.default_rng(0).random(3_000_000, dtype=np.float32)
    assert float(flow.tensor(x).sum().numpy()) == pytest.approx(x.astype(np.float64).sum(), rel=4 * EPS)


def test_transposing_in_a_graph(library, counted):
    x = random(3, 4, 5, 6)

    class Graph(nn.Graph):
        def build(self, t):
            return [t.permute(*order) * 1.0 for order in orders]

    orders = list(itertools.permutations(range(4)))[::3]
    for found, order in zip(Graph()(flow.tensor(x)), orders):
        np.testing.assert_array_equal(found.numpy(), x.transpose(order))
    counted("transpose")


def test_copies_of_views(level):
    x = random(3, 4, 5, 6, 33)
    for order in itertools.islice(itertools.permutations(range(5)), 0, None, 9):
        found = flow.tensor(x).permute(*order).contiguous()
        np.testing.assert_array_equal(found.numpy(), x.transpose(order))
        found = flow.tensor(x)[:, 1:3, ::2, 2:, 1:].permute(*order).contiguous()
        np.testing.assert_array_equal(found.numpy(), x[:, 1:3, ::2, 2:, 1:].transpose(order))
        found = flow.tensor(x[:, :1]).expand(3, 4, 5, 6, 33).permute(*order).contiguous()
        np.testing.assert_array_equal(found.numpy(), np.broadcast_to(x[:, :1], x.shape).transpose(order))
    assert flow.zeros(0, 3).transpose(0, 1).contiguous().shape == (3, 0)
