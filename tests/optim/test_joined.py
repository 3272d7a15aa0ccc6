"""One operation for all parameters equals one operation per parameter, bit for bit."""

import math

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_array_equal
from oneflow import nn
from toy import Tagger, batches

from libai.engine import EagerTrainer
from libai.optim import JoinedUpdates, clip_grad_norm, norm_and_coefficient
from libai.optim.joined import are_joinable

SHAPES = ((33, 17), (), (5,), (1, 1), (300,))

OPTIMIZERS = {
    "sgd": lambda p: flow.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "momentum": lambda p: flow.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, dampening=0.2),
    "nesterov": lambda p: flow.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "maximize": lambda p: flow.optim.SGD(p, lr=1e-2, momentum=0.9, maximize=True),
    "adam": lambda p: flow.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adamw": lambda p: flow.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "no correction": lambda p: flow.optim.AdamW(p, lr=1e-2, do_bias_correction=False),
}


def trained(build, update, missing=()):
    """Weights and states after 5 updates in two groups; the parameters `missing` have gradients in
    the last two.
    """
    rng = np.random.default_rng(0)
    parameters = [
        nn.Parameter(flow.tensor(np.asarray(rng.standard_normal(s), np.float32))) for s in SHAPES
    ]
    optimizer = build([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.03}])
    for iteration in range(5):
        for index, parameter in enumerate(parameters):
            gradient = flow.tensor(np.asarray(rng.standard_normal(parameter.shape), np.float32))
            parameter.grad = None if index in missing and iteration < 3 else gradient
        update(optimizer, parameters)
    states = [tensor for p in parameters for tensor in optimizer._state[p].values()]
    return [tensor.numpy() for tensor in [*parameters, *states]], optimizer._state["step"]


def one_by_one(optimizer, parameters):
    clip_grad_norm(parameters, 0.5)
    optimizer.step()


def together(optimizer, parameters):
    joined = JoinedUpdates(optimizer)
    assert joined.fits
    joined.step(norm_and_coefficient(parameters, 0.5)[1])


@pytest.mark.filterwarnings("ignore:Only Momentum")
@pytest.mark.parametrize("missing", [(), (1,), (0, 1)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_single_operations(library, name, missing):
    before = library.calls()
    found, steps = trained(OPTIMIZERS[name], together, missing)
    expected, expected_steps = trained(OPTIMIZERS[name], one_by_one, missing)
    assert sum(
        n - before[op] for op, n in library.calls().items() if op.startswith("multi_tensor")
    ) in (7, 10)
    assert steps == expected_steps == 5
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert_array_equal(one, other)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_the_norm_shows_what_is_not_finite(library, bad):
    parameter, other = nn.Parameter(flow.zeros(40)), nn.Parameter(flow.zeros(40))
    parameter.grad, other.grad = flow.zeros(40), flow.ones(40)
    parameter.grad[33] = bad
    found = norm_and_coefficient([parameter, other], 1.0)[0].numpy().item()
    assert math.isnan(found) if math.isnan(bad) else found == math.inf


class Watching(flow.optim.AdamW):
    """One of the user's own, which may look at gradients."""


def test_what_cannot_be_joined(library):
    one, wide = nn.Parameter(flow.zeros(2)), nn.Parameter(flow.zeros(2, dtype=flow.float64))
    assert are_joinable([one])
    assert not are_joinable([one, wide])
    assert not are_joinable([])
    assert JoinedUpdates(flow.optim.AdamW([one])).fits
    assert not JoinedUpdates(flow.optim.AdamW([one, wide])).fits
    assert not JoinedUpdates(flow.optim.AdamW([one], amsgrad=True)).fits
    assert not JoinedUpdates(flow.optim.LAMB([one])).fits
    assert not JoinedUpdates(Watching([one])).fits
    optimizer = flow.optim.AdamW([one])
    optimizer.step = lambda: None
    assert not JoinedUpdates(optimizer).fits


def test_gradients_that_are_kept_are_clipped(library):
    """With `zero_grad_before_forward` hooks see them in after_step; otherwise only the update knows
    the coefficient.
    """

    def trained_by(**options):
        flow.manual_seed(0)
        model = Tagger()
        optimizer = flow.optim.AdamW(model.parameters(), lr=1e-2)
        EagerTrainer(model, batches(3), optimizer, max_grad_norm=1e-3, **options).train(0, 3)
        return list(model.parameters())

    kept, dropped = trained_by(zero_grad_before_forward=True), trained_by()
    norm = np.linalg.norm(np.concatenate([parameter.grad.numpy().ravel() for parameter in kept]))
    assert norm == pytest.approx(1e-3, rel=1e-2)
    assert all(parameter.grad is None for parameter in dropped)
    for one, other in zip(kept, dropped):
        assert_array_equal(one.numpy(), other.numpy())
