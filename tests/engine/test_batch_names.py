"""The entries of a batch reach forward's arguments by name, in both modes, whatever their order."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from libai.engine import EagerTrainer, GraphTrainer
from libai.parallel import Mesh

UPDATES = 8


class Net(nn.Module):
    """Uses its optional arguments differently."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y, mask=None, weight=None, **others):
        error = (self.fc(x) - y.float()) ** 2
        for factor, value in ((2.0, mask), (3.0, weight), (5.0, others.get("extra"))):
            if value is not None:
                error = error * (factor + value)
        return error.mean()


def numbers(seed, dtype="float32"):
    return np.random.default_rng(seed).normal(size=(8, 4)).astype(dtype)


def reordered(i):
    batch = {"x": numbers(i), "y": numbers(i + 100), "extra": numbers(i + 200)}
    return batch if i < 4 else dict(reversed(batch.items()))


def other_argument(i):
    return {"x": numbers(i), "y": numbers(i + 100), "mask" if i < 4 else "weight": numbers(i + 200)}


def additional_argument(i):
    batch = {"x": numbers(i), "y": numbers(i + 100)}
    return batch if i < 4 else {"extra": numbers(i), **batch}


def other_type(i):
    return {"x": numbers(i), "y": numbers(i + 100, "float32" if i < 4 else "float64")}


def model():
    net = Net()
    for seed, parameter in enumerate(net.parameters()):
        values = np.random.default_rng(seed).normal(0, 0.3, tuple(parameter.shape))
        parameter.data.copy_(flow.tensor(values.astype("float32")))
    return net, flow.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def plain_losses(data, accumulation):
    net, optimizer = model()
    losses = []
    for update in range(UPDATES):
        batches = [data(update * accumulation + micro) for micro in range(accumulation)]
        parts = [net(**{name: flow.tensor(value) for name, value in b.items()}) for b in batches]
        loss = sum(parts[1:], parts[0]) / accumulation
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("data", [reordered, other_argument, additional_argument, other_type])
def test_entries_are_bound_by_name(mode, data, accumulation):
    net, optimizer = model()
    batches = (data(i) for i in range(UPDATES * accumulation))
    cls = {"eager": EagerTrainer, "graph": GraphTrainer}[mode]
    trainer = cls(
        net, batches, optimizer, mesh=Mesh(), device="cpu", num_accumulation_steps=accumulation
    )
    losses = []
    for update in range(UPDATES):
        trainer.train(update, update + 1)
        losses.append(trainer.fetch_metrics()["train/loss"])
    # the same operations in the same order; a compiled job may add gradients in another order
    np.testing.assert_allclose(losses, plain_losses(data, accumulation), rtol=1e-5)


def test_micro_batches_of_one_update_may_have_different_names(mode):
    def data(i):
        return other_argument(i % 2 * 5)

    test_entries_are_bound_by_name(mode, data, 2)
