"""`train.deterministic` refuses a model with random numbers that no seed controls."""

import random

import numpy as np
import oneflow as flow
import pytest
from refusals import refused
from toy import Classifier, losses_of, make_trainer

from libai.engine.hooks import RandomStateHook
from libai.layers import Dropout


class Noise(flow.nn.Module):
    """Adds a number returned by `draw`."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x + self.draw()


class Noisy(Classifier):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def forward(self, x, y):
        return Classifier.forward(self, self.noise(x), y)


def unseeded():
    """The numbers span fifteen decades, so that two samples are never almost equal."""
    return 10 ** random.SystemRandom().uniform(0, 15)


def train(mode, noise, deterministic=True):
    trainer = make_trainer(
        mode, model=lambda: Noisy(noise), deterministic=deterministic, rehearse=None
    )
    trainer.register_hooks([RandomStateHook(3)])
    return losses_of(trainer, 3)


def test_a_random_number_without_a_seed_is_refused(mode):
    with refused(r"deterministic=true cannot be kept.* in update 1 the loss 'loss' is"):
        train(mode, Noise(unseeded))


@pytest.mark.e2e
def test_without_the_check_such_a_run_differs_from_the_next():
    """Negative control. A graph refuses the random number even without the check."""
    runs = [train("eager", Noise(unseeded), deterministic=False) for _ in range(2)]
    assert runs[0] != runs[1]
    with refused("is not repeatable"):
        train("graph", Noise(unseeded), deterministic=False)


@pytest.mark.parametrize(
    "draw",
    [lambda: random.random(), lambda: float(np.random.rand()), lambda: 0.5],
    ids=["python", "numpy", "none"],
)
def test_seeded_random_numbers_pass(draw):
    assert len(train("eager", Noise(draw))) == 3


@pytest.mark.e2e
def test_oneflow_random_numbers_and_libai_dropout_pass():
    assert len(train("eager", Noise(lambda: flow.rand(1)))) == 3
    assert len(train("eager", Dropout(0.5))) == 3


def test_the_check_changes_nothing(mode):
    """Generators, weights and data position are unchanged."""
    assert train(mode, Dropout(0.5)) == train(mode, Dropout(0.5), deterministic=False)
