"""Operations that OneFlow 0.9.0 computes wrongly have the values of NumPy and PyTorch."""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow import nn
from refusals import refused

from libai.forward.index_check import IndexCheck

WHOLE = np.arange(-6, 6).reshape(3, 4)


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize("divisor", [3, -3])
def test_remainders_and_quotients_follow_the_sign_of_python(dtype, divisor):
    array = WHOLE.astype(dtype)
    assert_allclose((flow.tensor(array) % divisor).numpy(), array % divisor)
    assert_allclose((flow.tensor(array) // divisor).numpy(), array // divisor)


@pytest.mark.parametrize("axis", [-1, -2])
def test_roll_counts_negative_axes_from_the_end(axis):
    assert np.array_equal(flow.tensor(WHOLE).roll(1, axis).numpy(), np.roll(WHOLE, 1, axis))


def test_layer_norm_applies_a_weight_without_a_bias():
    weight, x = flow.tensor([3.0] * 4, requires_grad=True), flow.randn(2, 4)
    found = nn.functional.layer_norm(x, (4,), weight)
    assert_allclose(found.numpy(), 3.0 * nn.functional.layer_norm(x, (4,)).numpy(), rtol=1e-6)
    found.sum().backward()
    assert weight.grad is not None


def test_operations_of_bits_are_refused():
    with refused("`&`, `|` or `^` of integer tensors: OneFlow 0.9.0 computes a logical operation"):
        flow.tensor(WHOLE) & 1
    assert (flow.tensor(WHOLE > 0) | flow.tensor(WHOLE > 1)).dtype == flow.bool


def test_a_vector_times_matrices_has_a_gradient():
    """OneFlow's own backward pass ends the process."""
    x = flow.ones(4, requires_grad=True)
    (x @ flow.ones(2, 4, 4) @ x).sum().backward()
    assert_allclose(x.grad.numpy(), 16.0)


def test_a_frozen_transposed_convolution_passes_a_gradient_on():
    """OneFlow's own backward pass ends the process."""
    layer = nn.ConvTranspose2d(2, 3, 2).requires_grad_(False)
    layer.weight.copy_(flow.arange(24.0).reshape(2, 3, 2, 2))
    x = flow.ones(1, 2, 4, 4, requires_grad=True)
    layer(x).sum().backward()
    assert_allclose(x.grad.numpy()[0, :, 0, 0], layer.weight.numpy().sum((1, 2, 3)), rtol=1e-5)


def test_a_pool_keeps_an_axis_whose_size_is_none():
    x = flow.randn(1, 2, 4, 6)
    assert nn.functional.adaptive_avg_pool2d(x, (2, None)).shape == (1, 2, 2, 6)


def test_a_truncated_float_is_refused_in_the_first_forward():
    x, number = flow.arange(4), flow.tensor(0.5)
    with IndexCheck(nn.Linear(1, 1)).watch([{}], "batch 1"):
        assert (x.float() + number).dtype == flow.float32
        with refused("truncates the result in OneFlow 0.9.0. Convert the integers first"):
            number * x
