"""SyncBatchNorm computes what OneFlow's batch normalization does, in both modes; on ranks:
tests/dist.
"""

import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow import nn
from refusals import refused

from libai.layers import SyncBatchNorm, synchronize_batch_norms

SHAPES = {
    (6, 4): nn.BatchNorm1d,
    (6, 4, 7): nn.BatchNorm1d,
    (6, 4, 3, 5): nn.BatchNorm2d,
    (6, 4, 2, 3, 2): nn.BatchNorm3d,
}


def differ(one, other):
    return float(abs(one.numpy() - other.numpy()).max() / max(1.0, abs(one.numpy()).max()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_values_gradients_and_running_statistics_are_those_of_the_kernel(shape, affine):
    stock, synchronized = SHAPES[shape](4, affine=affine), SyncBatchNorm(4, affine=affine)
    flow.manual_seed(0)
    x, weights = flow.randn(*shape) * 2.0 + 1.0, flow.randn(*shape)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, given in zip((stock, synchronized), inputs):
        for _ in range(2):
            (layer(given) * weights).sum().backward()
    assert differ(inputs[0].grad, inputs[1].grad) <= 2e-6
    assert all(
        differ(a.grad, b.grad) <= 2e-6
        for a, b in zip(stock.parameters(), synchronized.parameters())
    )
    assert all(differ(a, b) <= 2e-6 for a, b in zip(stock.buffers(), synchronized.buffers()))
    expected = 0.81 + 0.19 * x.numpy().swapaxes(0, 1).reshape(4, -1).var(axis=1, ddof=1)
    assert_allclose(synchronized.running_var.numpy(), expected, rtol=1e-5)  # unbiased
    assert differ(stock.eval()(x), synchronized.eval()(x)) <= 2e-6


def test_conversion_keeps_parameters_and_refuses_what_it_does_not_know():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    model.norm = nn.BatchNorm1d(5)
    before = list(model.parameters())
    assert synchronize_batch_norms(model) == synchronize_batch_norms(model) == 2
    assert all(a is b for a, b in zip(before, model.parameters()))
    assert synchronize_batch_norms(nn.Linear(2, 2)) == 0

    class Mine(nn.BatchNorm1d):
        pass

    with refused(
        "norm is a Mine, but train.dist.sync_batch_norm=true only supports nn.BatchNorm1d",
    ):
        model.norm = Mine(5)
        synchronize_batch_norms(model)
    with pytest.raises(ValueError, match="more than one value per channel"):
        SyncBatchNorm(3)(flow.ones(1, 3))
