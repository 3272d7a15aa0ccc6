"""`rehearse_every` finds a bit that a machine has computed wrongly, and nothing else."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from refusals import refused
from test_parity_in_training import Averaging
from test_rehearsal import Noisy
from toy import Classifier, batches, make_trainer

from libai.engine.trainer import ModelTrainer
from libai.patches.wrapping import replaced

#: number of the iteration whose update the machine computes wrongly, from 0
BAD = 3


def flipped(tensor):
    """Return a copy of a tensor with one other bit in its first element that is not zero."""
    values = tensor.detach().numpy().copy()
    values.view(np.uint32).flat[np.flatnonzero(values)[0]] ^= 1 << 12
    return flow.tensor(values)


def flip_weight(trainer):
    weight = trainer.model.a.weight.data
    weight.copy_(flipped(weight))
    return flow.relu


def flip_state(trainer):
    state = trainer.optimizer._state[trainer.model.a.weight]["exp_avg"]
    state.copy_(flipped(state))
    return flow.relu


def flip_activation(trainer):
    relu = flow.relu
    return lambda x: relu(x) + (flipped(relu(x)) - relu(x).detach())


def flip_gradient(trainer):
    relu = flow.relu

    def relu_with_wrong_gradient(x):
        x.register_hook(flipped)
        return relu(x)

    return relu_with_wrong_gradient


class Reading(Classifier):
    """Adds a buffer to an activation: a change of the buffer is one of the compiled activation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("error", flow.zeros(1))

    def forward(self, x, y):
        hidden = flow.relu(self.a(x) + self.error)
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}


def flip_activation_in_graph(trainer):
    trainer.model.error.fill_(2.0**-12)
    return flow.relu


@pytest.fixture
def compute_wrongly(monkeypatch):
    """Return a function that makes call `number` of the update wrong.

    The first call is the rehearsal, if there is one. `flip`: changes a tensor, and returns the
    `relu` of the call.
    """
    update = ModelTrainer.update
    calls = []

    def plant(flip, number):
        def update_wrongly(trainer, micro_batches):
            calls.extend([trainer.iter] * (trainer.iter == BAD))
            if len(calls) != number:
                return update(trainer, micro_batches)
            with replaced((flow, "relu", flip(trainer))):
                result = update(trainer, micro_batches)
            for error in trainer.model.buffers():
                error.zero_()
            return result

        monkeypatch.setattr(ModelTrainer, "update", update_wrongly)

    return plant


@pytest.mark.parametrize(
    "flip, mode",
    [
        *((flip, "eager") for flip in (flip_weight, flip_state, flip_activation, flip_gradient)),
        *((flip, "graph") for flip in (flip_weight, flip_state, flip_activation_in_graph)),
    ],
)
def test_a_flipped_bit_is_found_and_named(flip, mode, compute_wrongly):
    compute_wrongly(flip, 2)
    trainer = make_trainer(mode, batches(6), Reading, rehearse_every=2)
    with refused(r"iteration 4: made twice .* different bits, .* \(Linear\) on rank 0"):
        trainer.train(0, 6)
    assert trainer.completed_iters == BAD


def test_a_flipped_bit_goes_unnoticed_without_the_check(mode, compute_wrongly):
    """Negative control: the update of another iteration is repeated."""
    compute_wrongly(flip_weight, 1)
    make_trainer(mode, batches(6), rehearse_every=5).train(0, BAD + 1)


@pytest.mark.parametrize("updates", [10, pytest.param(400, marks=pytest.mark.nightly)])
def test_right_updates_raise_no_alarm(mode, updates):
    make_trainer(mode, batches(8), Averaging, rehearse_every=1).train(0, updates)


def test_an_update_that_cannot_be_repeated_is_named_once(caplog):
    batch = {"x": np.ones((4, 6), np.float32), "y": np.zeros(4, np.int64)}
    make_trainer("eager", [batch], Noisy, rehearse_every=1).train(0, 3)
    assert caplog.text.count("to the last bit: OneFlow's own dropout ignores seeds") == 1
