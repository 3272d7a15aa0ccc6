"""Compare libai's float32 results with OneFlow's float64 results on random numbers."""

import numpy as np
import oneflow as flow

EPS = float(np.finfo(np.float32).eps)


def close(found, expected, spread=1.0):
    """Check that arrays are equal up to 8 roundings of the largest number, times `spread` for sums
    of many terms.
    """
    assert found.dtype == np.float32 and found.shape == expected.shape
    if expected.size:
        largest = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=8 * EPS * largest * spread)


def random(*shape, seed=0, spread=2.0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * spread).astype(
        np.float32
    )


def results(function, arrays, dtype):
    """Return the value of `function` and the gradients of its sum with random factors, computed in
    `dtype`.
    """
    tensors = [flow.tensor(array.astype(dtype), requires_grad=True) for array in arrays]
    value = function(*tensors)
    factors = random(*value.shape, seed=99).astype(dtype)
    (value * flow.tensor(factors)).sum().backward()
    return [value.numpy(), *(tensor.grad.numpy() for tensor in tensors)]


def compare(function, *arrays, spread=1.0):
    """Check that our value and gradients in float32 match OneFlow's own kernels in float64."""
    expected = results(function, arrays, np.float64)
    for ours, theirs in zip(results(function, arrays, np.float32), expected):
        close(ours, theirs, spread)
