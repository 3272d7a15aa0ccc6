"""What the tests of kernels share: random numbers, comparisons with float64, values and gradients."""

from __future__ import annotations

import numpy as np
import oneflow as flow

EPS = float(np.finfo(np.float32).eps)


def close(found, expected, scale=None):
    """Equal up to 8 roundings of the largest number (or of `scale`)."""
    expected = np.asarray(expected, np.float64)
    if expected.size == 0:
        assert found.shape == expected.shape
        return
    assert found.dtype == np.float32 and found.shape == expected.shape
    largest = max(1.0, np.abs(expected).max()) if scale is None else scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=8 * EPS * largest)


def random(*shape, seed=0, spread=2.0):
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def value_and_gradients(function, *arrays, seed=1):
    """The value, the factors that it is summed with (in float64), and the gradients."""
    tensors = [flow.tensor(array, requires_grad=True) for array in arrays]
    value = function(*tensors)
    factors = random(*value.shape, seed=seed)
    (value * flow.tensor(factors)).sum().backward()
    return value.numpy(), factors.astype(np.float64), [t.grad.numpy() for t in tensors]
