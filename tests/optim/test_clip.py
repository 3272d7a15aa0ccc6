"""Clipping by the global norm, against float64."""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow import nn

from libai.optim import clip_grad_norm, norm_and_coefficient


def parameters_with_gradients(*shapes, scale=1.0, dtype="float32"):
    rng = np.random.RandomState(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(flow.tensor(np.zeros(shape, dtype)))
        parameter.grad = flow.tensor(np.asarray(scale * rng.randn(*shape), dtype))
        parameters.append(parameter)
    return parameters


def exact_norm(parameters):
    values = np.concatenate([parameter.grad.numpy().ravel() for parameter in parameters]).astype(
        "float64"
    )
    return np.linalg.norm(values)


def norm_of(parameters):
    return norm_and_coefficient(parameters, 1.0)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norm_and_scaled_gradients(dtype):
    parameters = parameters_with_gradients((8, 4), (4,)) + parameters_with_gradients(
        (2, 3, 2), dtype=dtype
    )
    expected = exact_norm(parameters)
    before = [parameter.grad.numpy().copy() for parameter in parameters]
    norm = clip_grad_norm(parameters, max_norm=0.5)
    assert norm.shape == ()
    assert norm.numpy().item() == pytest.approx(expected, rel=1e-6)
    for parameter, gradient in zip(parameters, before):
        assert_allclose(parameter.grad.numpy(), gradient * (0.5 / expected), rtol=1e-5)


def test_gradients_that_are_views_are_clipped_by_their_own_values():
    """As OneFlow's DDP makes them; a tensor that `grad` was set to does not know where it begins
    (0006).
    """
    values = np.arange(40, dtype="float32")
    bucket = flow.tensor(values)
    parameters = [nn.Parameter(flow.zeros(4, 8)), nn.Parameter(flow.zeros(2, 2))]
    parameters[0].grad, parameters[1].grad = bucket[:32].view(4, 8), bucket[32:36].view(2, 2)
    norm = clip_grad_norm(parameters, 0.5)
    expected = np.linalg.norm(values[:36])
    assert norm.numpy() == pytest.approx(expected, rel=1e-6)
    scaled = values * (0.5 / expected)
    assert_allclose(parameters[0].grad.numpy(), scaled[:32].reshape(4, 8), rtol=1e-5)
    assert_allclose(parameters[1].grad.numpy(), scaled[32:36].reshape(2, 2), rtol=1e-5)


def test_gradients_within_the_bound_stay_bitwise():
    parameters = parameters_with_gradients((8, 4), (4,), scale=1e-3)
    before = [parameter.grad.numpy().copy() for parameter in parameters]
    clip_grad_norm(parameters, max_norm=1.0)
    for parameter, gradient in zip(parameters, before):
        assert np.array_equal(parameter.grad.numpy(), gradient)


LAYERS = [(48,)] * 30 + [(48, 49)] * 20  # as those of a small model


@pytest.mark.parametrize(
    "shapes",
    [
        *([(4097,)], [(64, 65), (3,), (5000,)], [()], [(2, 3, 4, 512)]),
        *(LAYERS, [(257, 257)], [*LAYERS, (257, 257), (300, 300)]),
    ],
)
def test_the_norm_of_every_size_is_exact(shapes):
    parameters = parameters_with_gradients(*shapes)
    expected = exact_norm(parameters)
    assert norm_of(parameters).numpy().item() == pytest.approx(expected, rel=5e-7)


def test_missing_gradients_are_skipped():
    parameters = parameters_with_gradients((3,), (2,))
    parameters[0].grad = None
    expected = exact_norm(parameters[1:])
    assert clip_grad_norm(parameters, 0.1).numpy().item() == pytest.approx(expected, rel=1e-6)
    assert parameters[0].grad is None
    parameters[1].grad = None
    assert clip_grad_norm(parameters, 0.1).numpy().item() == 0.0
