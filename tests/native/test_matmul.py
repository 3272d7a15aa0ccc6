"""Products of matrices, of batches and broadcast, against NumPy in float64; with sizes that go to OpenBLAS."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from native_reference import close, random, value_and_gradients
from oneflow import nn

#: shapes of a and b, and whether each is transposed
CASES = [
    ((5, 7), (7, 9), False, False),  # OpenBLAS's: so small that to begin takes longer
    ((33, 48), (48, 32), False, False),
    ((300, 300), (300, 45), False, False),  # rows, terms and columns that no block divides
    ((300, 300), (45, 300), False, True),
    ((530, 33), (530, 64), True, False),
    ((300, 35), (300, 45), True, False),
    ((70, 90), (110, 70), True, True),
    ((3, 4, 50, 60), (3, 4, 60, 80), False, False),
    ((3, 4, 50, 60), (3, 4, 80, 60), False, True),
    ((3, 4, 60, 51), (3, 4, 60, 16), True, False),
    ((4, 50, 60), (60, 20), False, False),
    ((2, 1, 50, 60), (3, 60, 90), False, False),
    ((50, 60), (4, 60, 90), False, False),
    ((1, 600), (600, 900), False, False),
    ((1, 577), (900, 577), False, True),  # few rows
    ((7, 600), (333, 600), False, True),
    ((3, 4, 2, 100), (3, 4, 200, 100), False, True),
    ((500, 400), (400, 500), False, False),  # OpenBLAS's: it has threads for such
]


def product(a, b, transposes_a, transposes_b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.matmul(a.swapaxes(-1, -2) if transposes_a else a, b.swapaxes(-1, -2) if transposes_b else b)


@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(level, library, case, alpha):
    a_shape, b_shape, *transposed = case
    a, b = random(*a_shape), random(*b_shape, seed=1)
    before = library.calls()
    found = flow._C.matmul(flow.tensor(a), flow.tensor(b), *transposed, alpha).numpy()
    assert sum(library.calls()[op] - before[op] for op in ("matmul", "batch_matmul", "broadcast_matmul")) == 1
    close(found, alpha * product(a, b, *transposed))


@pytest.mark.parametrize("shape", [(64, 48), (5, 40, 48), (2, 3, 40, 48), (7, 48)])
def test_a_linear_layer_and_its_gradients(level, counted, shape):
    x, w = random(*shape), random(96, 48, seed=2)
    found, g, gradients = value_and_gradients(lambda t, v: flow._C.matmul(t, v, transpose_b=True), x, w)
    close(found, product(x, w, False, True))
    close(gradients[0], g @ w.astype(np.float64))
    close(gradients[1], product(g.reshape(-1, 96), x.reshape(-1, 48), True, False))
    counted("matmul" if len(shape) == 2 else "broadcast_matmul_grad_b")


def test_attention_and_its_gradients(level, counted):
    q, k = random(2, 3, 33, 32), random(2, 3, 40, 32, seed=1)
    found, g, gradients = value_and_gradients(lambda a, b: flow.matmul(a, b.transpose(-1, -2)), q, k)
    close(found, product(q, k, False, True))
    close(gradients[0], g @ k.astype(np.float64))
    close(gradients[1], product(g, q, True, False))
    counted("batch_matmul")


def test_products_of_nothing_and_with_nan(level):
    for a, b in (((0, 6), (6, 9)), ((5, 0), (0, 9)), ((3, 0, 6), (3, 6, 9))):
        found = flow.matmul(flow.zeros(*a), flow.zeros(*b)).numpy()
        np.testing.assert_array_equal(found, np.zeros((*a[:-1], 9), np.float32))
    a, b = random(40, 40), random(40, 40, seed=1)
    a[3, 7], b[5, 39] = np.nan, np.inf
    found = flow.matmul(flow.tensor(a), flow.tensor(b)).numpy()
    expected = product(a, b, False, False)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    assert np.isnan(found).sum() == 40


def test_gradients_that_are_added_up_in_a_graph(library, counted):
    """A matrix that is used twice: the second product adds to the first."""
    x, w = random(64, 48), random(48, 48, seed=2, spread=0.2)
    linear = nn.Linear(48, 48, bias=False)
    with flow.no_grad():
        linear.weight.copy_(flow.tensor(w))
    optimizer = flow.optim.SGD(linear.parameters(), lr=1.0)

    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.linear = linear
            self.add_optimizer(optimizer)

        def build(self, t):
            y = self.linear(self.linear(t))
            y.sum().backward()
            return y

    wide, v = x.astype(np.float64), w.astype(np.float64)
    hidden, ones = wide @ v.T, np.ones((64, 48))
    close(Graph()(flow.tensor(x)).numpy(), hidden @ v.T)
    expected = ones.T @ hidden + (ones @ v).T @ wide
    close(w - linear.weight.numpy(), expected, scale=np.abs(expected).max() + 8.0)
    counted("matmul")


def test_float64_stays_oneflows(library):
    before = library.calls()["matmul"]
    a, b = random(40, 40).astype(np.float64), random(40, 40, seed=1).astype(np.float64)
    np.testing.assert_allclose(flow.matmul(flow.tensor(a), flow.tensor(b)).numpy(), a @ b, rtol=1e-12, atol=1e-12)
    assert library.calls()["matmul"] == before
