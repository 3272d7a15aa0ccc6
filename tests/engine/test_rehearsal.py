"""A rehearsal leaves custom optimizers and schedules unchanged, and its bounds detect wrong
gradients.
"""

from types import SimpleNamespace

import coupled_models as cm
import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from oneflow.optim.lr_scheduler import LambdaLR
from test_kept import Own, halving_with_a_lock
from toy import batches, losses_of, make_trainer, trainer_of

from libai.engine.rehearsal.comparison import State, Updates, first_difference
from libai.layers import Dropout

LR = 0.1


class Lookahead(flow.optim.SGD):
    """An optimizer that moves its slow weights every third step."""

    def __init__(self, parameters, lr):
        self.fast = list(parameters)
        super().__init__(self.fast, lr=lr)
        self.slow = [parameter.detach().clone() for parameter in self.fast]
        self.steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            with flow.no_grad():
                for fast, slow in zip(self.fast, self.slow):
                    slow.add_(0.5 * (fast - slow))
                    fast.copy_(slow)


def of_a_function(optimizer):
    steps = {"made": 0}

    def step():
        steps["made"] += 1
        optimizer.param_groups[0]["lr"] = LR / (1 + steps["made"])

    return SimpleNamespace(step=step)


def of_an_iterator(optimizer):
    rates = iter([LR / number for number in range(2, 40)])

    def step():
        optimizer.param_groups[0]["lr"] = next(rates)

    return SimpleNamespace(step=step)


def of_a_counting_lambda(optimizer):
    calls = []

    def factor(step):
        calls.append(step)
        return 1 / len(calls)

    return LambdaLR(optimizer, factor)


class Cyclic:
    """Changes settings of the groups other than the learning rate."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["weight_decay"] = np.float32(0.1 * self.steps)


class Counting(flow.optim.SGD):
    """Keeps a number in the state of each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group.parameters:
                state = self._state[parameter]
                state["times"] = state.get("times", 0) + 1
                parameter.grad.mul_(1 / state["times"])
        super().step(closure)


def momentum(model):
    return flow.optim.SGD(model.parameters(), lr=LR, momentum=0.5)


def losses(mode, rehearse, schedule=None, optimizer=momentum):
    trainer = make_trainer(
        mode,
        batches(5),
        optimizer=optimizer,
        schedule=schedule,
        rehearse=rehearse,
        rehearse_every=3 if rehearse else 0,
    )
    return losses_of(trainer, 5)


@pytest.mark.parametrize(
    "schedule",
    [of_a_function, of_an_iterator, of_a_counting_lambda, Cyclic, halving_with_a_lock, Own],
)
@pytest.mark.promise
def test_a_schedule_with_its_own_state_starts_from_its_initial_state(mode, schedule):
    assert losses(mode, 2, schedule) == losses(mode, 0, schedule)


@pytest.mark.parametrize("own", [Lookahead, Counting])
def test_an_optimizer_with_its_own_state_starts_from_its_initial_state(own):
    def build(model):
        return own(model.parameters(), lr=LR)

    assert losses("eager", 2, optimizer=build) == losses("eager", 0, optimizer=build)


def update(gradient, **settings):
    """Return one update of a weight by SGD with momentum, with a loss of 1."""
    states = {}
    for number, value in enumerate((0.0, gradient)):
        array = np.full(4, value, dtype=np.float32)
        states[number] = State({"w": 1 - LR * array}, {"w/momentum_buffer": array}, {})
    return Updates(losses=[{"train/loss": 1.0}], states=states, **settings)


@pytest.mark.parametrize(
    "settings, rounding, wrong",
    [
        ({}, 1.00005, 1.0002),
        ({"is_of_one_process": True}, 1.0005, 1.002),
        ({"device": "cuda"}, 1.005, 1.02),
    ],
)
def test_a_wrong_gradient_is_detected_and_rounding_is_not(settings, rounding, wrong):
    expected = update(1.0, **settings)
    assert "gradient" in str(first_difference(expected, update(wrong)))
    assert first_difference(expected, update(rounding)) is None
    assert first_difference(expected, update(rounding), is_exact=True).is_rounding
    assert first_difference(expected, update(1.0), is_exact=True) is None


class Noisy(cm._Body):
    """Uses every source of random numbers without mixing samples."""

    def __init__(self):
        super().__init__()
        self.ours, self.stock, self.norm = Dropout(0.4), nn.Dropout(0.4), nn.BatchNorm1d(cm.WIDTH)

    def loss(self, h, x, y):
        return self.classify(self.stock(self.ours(self.norm(h))), y)


def test_updates_that_are_meant_to_differ_are_not_rehearsed(caplog):
    model = Noisy()
    batch = {"x": np.ones((4, cm.WIDTH), np.float32), "y": np.zeros(4, np.int64)}
    trainer_of("graph", model, [batch], flow.optim.SGD(model.parameters(), lr=LR)).train(0, 1)
    assert (
        "the first updates are not rehearsed: OneFlow's own dropout uses different masks in a graph"
        in caplog.text
    )


def test_a_run_that_ends_before_compiling_pays_is_reported(caplog):
    caplog.set_level("INFO")
    trainer = make_trainer("graph", batches(3), rehearse=2)
    trainer.train(0, 3)
    assert "longer than the 3 updates that are left in eager mode" in caplog.text
    caplog.clear()
    trainer.max_iter += 1_000_000  # a long run
    trainer._report_short_run(update_seconds=1.0)
    assert caplog.text == ""
