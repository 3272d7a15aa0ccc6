"""FLOPs are counted by the operations of one forward, whatever the module, and equal in both modes."""

from __future__ import annotations

import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.forward.flops import FlopCounter

X = (2, 5, 6)  # samples, positions, features


class Forward(nn.Module):
    def __init__(self, function, *layers):
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), function

    def forward(self, x):
        return self.function(x, *self.layers)


def flops_of(function, *layers, shape=X):
    counter = FlopCounter()
    with flow.no_grad():
        counter.watching(Forward(function, *layers))(x=flow.ones(*shape))
    return counter.per_sample


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x @ flow.ones(6, 3), 2 * 5 * 6 * 3),
        (lambda x: flow.matmul(x, x, transpose_a=True), 2 * 6 * 5 * 6),
        (lambda x: flow.bmm(x, x.transpose(1, 2)), 2 * 5 * 6 * 5),
        (lambda x: flow.einsum("bik,bjk->bij", x, x), 2 * 5 * 5 * 6),
        (lambda x: flow.relu(x + 1) * x, 0),
    ],
)
def test_products_of_matrices(function, expected):
    assert flops_of(function) == expected


@pytest.mark.parametrize(
    "layer, shape, expected",
    [
        (nn.Linear(6, 3), X, 2 * 5 * 6 * 3),
        (nn.Conv2d(4, 8, 3, padding=1, groups=2), (2, 4, 5, 5), 2 * (8 * 25) * 2 * 9),
        (nn.LSTM(6, 7, num_layers=2, batch_first=True), X, 2 * 5 * 4 * 7 * ((6 + 7) + (7 + 7))),
    ],
)
def test_layers(layer, shape, expected):
    assert flops_of(lambda x, layer: layer(x), layer, shape=shape) == expected


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer_knows_the_flops_of_a_sample(mode, accumulation):
    model = toy.Classifier(width=16, classes=4)
    optimizer = toy.optimizer_of("sgd", model)
    # the first step is compared with an eager one, which would be counted in place of the compiled one
    unchecked = {"rehearse": 0}
    trainer = toy.trainer_of(mode, model, toy.batches(4), optimizer, num_accumulation_steps=accumulation, **unchecked)
    assert trainer.loop.flops.of_update is None
    trainer.train(0, 2)
    assert trainer.loop.flops.of_update == 3 * 2 * (8 * 16 + 16 * 4)
