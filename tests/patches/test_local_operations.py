"""Repaired operations have the same values and gradients as in NumPy."""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow import nn
from refusals import refused

from libai.patches.local_operations import repair_operations

CASES = {
    "first axes": ((4, 5, 3), lambda t: flow.diagonal(t), lambda a: np.diagonal(a)),
    "last axes": (
        (3, 4, 4),
        lambda t: flow.diagonal(t, 0, 1, 2),
        lambda a: np.diagonal(a, 0, 1, 2),
    ),
    "above": ((3, 4, 5), lambda t: t.diagonal(2, 1, -1), lambda a: np.diagonal(a, 2, 1, -1)),
    "below": ((5, 2, 3), lambda t: flow.diagonal(t, -1, 0, 2), lambda a: np.diagonal(a, -1, 0, 2)),
    "axes the other way": (
        (5, 2, 3),
        lambda t: flow.diagonal(t, 1, 2, 0),
        lambda a: np.diagonal(a, 1, 2, 0),
    ),
    "no repeats": (
        (3, 4),
        lambda t: flow.einsum("ab,cb->ac", t, t),
        lambda a: np.einsum("ab,cb->ac", a, a),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_numpys(name):
    shape, operation, reference = CASES[name]
    array = np.random.default_rng(0).standard_normal(shape)
    tensor = flow.tensor(array, requires_grad=True)
    found = operation(tensor)
    expected = reference(array)
    assert_allclose(found.numpy(), expected, rtol=1e-12)
    factors = np.random.default_rng(1).standard_normal(expected.shape)
    (found * flow.tensor(factors)).sum().backward()
    gradient = np.zeros(shape)
    for index in np.ndindex(shape):
        step = np.zeros(shape)
        step[index] = 1e-6
        gradient[index] = (
            (reference(array + step) - reference(array - step)) * factors
        ).sum() / 2e-6
    assert_allclose(tensor.grad.numpy(), gradient, rtol=1e-6, atol=1e-8)


def test_oneflows_own_gradient_has_another_shape():
    """Negative control, and the reason for the repair."""
    repair_operations()
    tensor = flow.zeros(3, 4, 4, requires_grad=True)
    flow._C.diagonal(tensor * 1.0, 0, 1, 2).sum().backward()
    assert tensor.grad.shape != tensor.shape


@pytest.mark.parametrize("equation", ["bii->bi", "b i i", "ibii->bi", "ii,ij->j", "...ii->...i"])
def test_an_index_twice_in_a_term_is_refused(equation):
    with refused(
        "repeats an index within a term, for which OneFlow 0.9 computes a wrong gradient",
    ):
        flow.einsum(equation, flow.ones(4, 4, 4))


def test_a_diagonal_outside_is_empty():
    assert flow.diagonal(flow.ones(2, 3), 5).shape == (0,)


def test_the_handle_of_a_forward_hook_removes_it():
    """As in PyTorch: once, and never another hook."""
    repair_operations()
    layer = nn.Linear(1, 1, bias=False)
    x = flow.ones(1, 1)
    layer.weight.data.fill_(1)
    first = layer.register_forward_hook(lambda module, inputs, output: output * 2)
    layer.register_forward_hook(lambda module, inputs, output: output + 10)
    assert layer(x).item() == 12
    first.remove()
    first.remove()
    with layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,)):
        assert layer(x).item() == 13
    assert layer(x).item() == 11
