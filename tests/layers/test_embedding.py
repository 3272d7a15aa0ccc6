"""Positions and class tokens: the values and gradients of NumPy, whatever mode and kind of tensor they meet."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from libai.layers import add_to_each, apply_linear, repeat_for_each
from libai.layers.cpu import sum_of

BATCH, LENGTH, WIDTH = 5, 3, 8


def numbers(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def leaf(array, needs_grad=True):
    return flow.tensor(array, requires_grad=needs_grad)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_adding_positions(needs_grad):
    x, shared = leaf(numbers(BATCH, LENGTH, WIDTH), needs_grad), leaf(numbers(LENGTH, WIDTH, seed=1))
    grad = numbers(BATCH, LENGTH, WIDTH, seed=2)
    out = add_to_each(x, shared)
    assert out.grad_fn.name() == "Adding_backward"
    out.backward(flow.tensor(grad))
    np.testing.assert_array_equal(out.detach().numpy(), x.detach().numpy() + shared.detach().numpy())
    np.testing.assert_allclose(shared.grad.numpy(), grad.astype(np.float64).sum(0), rtol=0, atol=2e-6)
    if needs_grad:
        np.testing.assert_array_equal(x.grad.numpy(), grad)


def test_adding_a_slice_of_positions():
    x, table = leaf(numbers(BATCH, LENGTH, WIDTH)), leaf(numbers(LENGTH + 4, WIDTH, seed=1))
    grad = numbers(BATCH, LENGTH, WIDTH, seed=2)
    add_to_each(x, table[:LENGTH]).backward(flow.tensor(grad))
    expected = np.concatenate([grad.astype(np.float64).sum(0), np.zeros((4, WIDTH))])
    np.testing.assert_allclose(table.grad.numpy(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (LENGTH, 1)])
def test_other_shapes_broadcast_as_ever(shape):
    x, shared = leaf(numbers(BATCH, LENGTH, WIDTH)), leaf(numbers(*shape, seed=1))
    out = add_to_each(x, shared)
    np.testing.assert_array_equal(out.detach().numpy(), x.detach().numpy() + shared.detach().numpy())
    out.sum().backward()
    np.testing.assert_allclose(shared.grad.numpy(), np.full(shape, BATCH * LENGTH * WIDTH / np.prod(shape)), rtol=1e-6)


def test_repeating_a_class_token():
    token, grad = leaf(numbers(1, 2, WIDTH)), numbers(BATCH, 2, WIDTH, seed=2)
    out = repeat_for_each(token, BATCH)
    np.testing.assert_array_equal(out.detach().numpy(), np.repeat(token.detach().numpy(), BATCH, 0))
    out.backward(flow.tensor(grad))
    np.testing.assert_allclose(token.grad.numpy(), grad.astype(np.float64).sum(0, keepdims=True), rtol=0, atol=2e-6)
    with flow.no_grad():
        np.testing.assert_array_equal(repeat_for_each(token, BATCH).numpy(), out.detach().numpy())


def test_a_tied_layer():
    x, weight, bias = (leaf(numbers(*s, seed=i)) for i, s in enumerate([(BATCH, LENGTH, WIDTH), (6, WIDTH), (6,)]))
    grad = numbers(BATCH, LENGTH, 6, seed=4)
    out = apply_linear(x, weight, bias)
    out.backward(flow.tensor(grad))
    rows, slopes = x.detach().numpy().reshape(-1, WIDTH).astype(np.float64), grad.reshape(-1, 6).astype(np.float64)
    expected = rows @ weight.detach().numpy().T + bias.detach().numpy()
    np.testing.assert_allclose(out.detach().numpy().reshape(-1, 6), expected, rtol=0, atol=5e-6)
    np.testing.assert_allclose(weight.grad.numpy(), slopes.T @ rows, rtol=0, atol=1e-5)
    np.testing.assert_allclose(bias.grad.numpy(), slopes.sum(0), rtol=0, atol=1e-5)
    with flow.no_grad():
        np.testing.assert_allclose(apply_linear(x, weight, bias).numpy(), out.detach().numpy(), rtol=0, atol=1e-6)


def test_all_of_it_compiles():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(flow.tensor(numbers(1, LENGTH, WIDTH)))
            self.bias = nn.Parameter(flow.tensor(numbers(LENGTH)))

        def forward(self, x):
            x = add_to_each(x, self.token.reshape(LENGTH, WIDTH)) * repeat_for_each(self.token, BATCH)
            return sum_of(apply_linear(x, self.token.reshape(LENGTH, WIDTH), self.bias))

    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def build(self, x):
            return self.model(x)

    x = flow.tensor(numbers(BATCH, LENGTH, WIDTH, seed=3))
    assert Graph()(x).item() == pytest.approx(Model()(x).item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (40, 50)])
def test_the_sum_of_all_elements(shape):
    x = leaf(np.asarray(np.random.RandomState(0).randn(*shape), dtype=np.float32))
    total = sum_of(x)
    assert total.shape == ()
    assert total.item() == pytest.approx(x.detach().numpy().astype(np.float64).sum(), rel=1e-5, abs=1e-4)
    (total * 2.0).backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full(shape, 2.0))
