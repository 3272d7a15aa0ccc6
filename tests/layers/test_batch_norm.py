"""SyncBatchNorm computes what OneFlow's batch normalization does, in both modes; on ranks:
tests/dist.
"""

import copy

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow import nn
from toy import record_losses, trainer_of

from libai.layers import SyncBatchNorm, synchronize_batch_norms
from libai.utils.errors import UserError

SHAPES = {
    (6, 4): nn.BatchNorm1d,
    (6, 4, 7): nn.BatchNorm1d,
    (6, 4, 3, 5): nn.BatchNorm2d,
    (6, 4, 2, 3, 2): nn.BatchNorm3d,
}


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()
        )
        self.hidden, self.norm, self.head = (
            nn.Linear(64, 5),
            nn.BatchNorm1d(5, momentum=0.3),
            nn.Linear(5, 1),
        )

    def forward(self, x):
        h = flow.tanh(self.norm(self.hidden(self.features(x))))
        return {"losses": {"mse": ((self.head(h).squeeze(1) - x.mean((1, 2, 3))) ** 2).mean()}}


def images(count):
    rng = np.random.RandomState(0)
    return [{"x": (rng.randn(8, 2, 4, 4) * 2.0 + 1.0).astype(np.float32)} for _ in range(count)]


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


@pytest.mark.e2e
def test_a_converted_model_trains_as_the_stock_one_does(mode):
    flow.manual_seed(0)
    stock = Convolutional()
    model = copy.deepcopy(stock)
    assert synchronize_batch_norms(model) == 2
    losses = []
    for one, how in ((stock, "eager"), (model, mode)):
        optimizer = flow.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)
        trainer = trainer_of(how, one, images(12), optimizer, num_accumulation_steps=2)
        losses.append(record_losses(trainer))
        trainer.train(0, 6)
        losses[-1].append(float(trainer.predict(images(1)[0])["losses"]["mse"].numpy()))
    assert_allclose(losses[0], losses[1], rtol=1e-5)
    state, other = stock.state_dict(), model.state_dict()
    assert list(state) == list(other)
    assert {
        name: differ(state[name], other[name])
        for name in state
        if differ(state[name], other[name]) > 1e-5
    } == {}
    assert int(model.norm.num_batches_tracked.numpy()) == 12


def test_conversion_keeps_parameters_and_refuses_what_it_does_not_know():
    model = Convolutional()
    before = list(model.parameters())
    assert synchronize_batch_norms(model) == synchronize_batch_norms(model) == 2
    assert all(a is b for a, b in zip(before, model.parameters()))
    assert synchronize_batch_norms(nn.Linear(2, 2)) == 0

    class Mine(nn.BatchNorm1d):
        pass

    with pytest.raises(
        UserError,
        match="norm is a Mine, but train.dist.sync_batch_norm=true only supports nn.BatchNorm1d",
    ):
        model.norm = Mine(5)
        synchronize_batch_norms(model)
    with pytest.raises(ValueError, match="more than one value per channel"):
        SyncBatchNorm(3)(flow.ones(1, 3))
