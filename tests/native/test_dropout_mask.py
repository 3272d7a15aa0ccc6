"""The fused dropout mask equals the mask that thirty operations compute, bit for bit."""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_array_equal

from libai.layers.dropout import Dropout
from libai.layers.random import fold, random_context

KEY = fold(7, 3, 1)


def dropped(x, key, p, layer_id, data_rank=0):
    """Return (output, gradient)."""
    layer = Dropout(p)
    layer.layer_id = layer_id
    x = flow.tensor(x, requires_grad=True)
    with random_context(key, data_rank):
        y = layer(x)
    y.sum().backward()
    return y.numpy(), x.grad.numpy()


@pytest.mark.parametrize(
    "shape, p, data_rank",
    [
        ((7,), 0.5, 0),
        ((8, 6, 33), 0.001, 3),
        ((8, 6, 33), 0.93, 0),
        ((64, 1), 0.001, 0),
        ((3, 5, 2, 4), 0.5, 3),
        ((1, 100), 0.93, 3),
    ],
)
def test_one_operation_gives_the_bits_of_the_formula(level, counted, stock, shape, p, data_rank):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    options = {"p": p, "layer_id": 12345, "data_rank": data_rank}
    found = dropped(x, KEY, **options)
    of_a_tensor = dropped(x, flow.tensor([KEY]), **options)
    counted("quantization")
    expected = stock(lambda: dropped(x, KEY, **options))
    for one, other, formula in zip(found, of_a_tensor, expected):
        assert_array_equal(one, formula)
        assert_array_equal(other, formula)
