"""The entries of a batch reach forward's arguments by name, in both modes, whatever their order."""

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn
from toy import numbers

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


def alternating(i):
    """Two micro-batches of one update have different names."""
    return other_argument(i % 2 * 5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "data", [reordered, other_argument, additional_argument, other_type, alternating]
)
def test_entries_are_bound_by_name(mode, data, accumulation):
    def model():
        net = toy.seeded(Net())
        return net, flow.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    expected = toy.plain_losses(*model(), data, UPDATES, accumulation=accumulation)
    losses, _ = toy.trained_losses(
        mode, *model(), data, UPDATES, num_accumulation_steps=accumulation
    )
    # the same operations in the same order; a compiled job may add gradients in another order
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
