"""Switching the mode during a run continues the same curve, for every optimizer, and so does
another trainer with its state.

Auto mode changes nothing.
"""

import gc
import weakref

import numpy as np
import pytest
import toy
from marks import slow_but
from parity_cases import OPTIMIZERS
from refusals import refused

from libai.engine import EagerTrainer
from libai.engine.hooks import CallbackHook
from libai.engine.rehearsal.kept import rolled_back
from libai.scheduler import WarmupCosineLR


def build(mode, optimizer_name, data):
    return toy.make_trainer(
        mode,
        data,
        toy.Tagger,
        OPTIMIZERS[optimizer_name],
        lambda optimizer: WarmupCosineLR(optimizer, max_iter=12, warmup_iter=3),
        max_grad_norm=1.0,
    )


def straight_losses(mode, optimizer_name, data, num_iters):
    """Return the losses of an uninterrupted run."""
    return toy.losses_of(build(mode, optimizer_name, data), num_iters)


@pytest.mark.parametrize(
    "is_dropped", [pytest.param(False, marks=pytest.mark.e2e), True], ids=["stays", "is_dropped"]
)
def test_undone_graph_updates_leave_the_optimizer_state_as_it_was(is_dropped):
    data = toy.batches(12, ignored=0.4)
    expected = straight_losses("graph", "adamw", data, 8)

    trainer = build("graph", "adamw", data)
    losses = toy.record_losses(trainer)
    trainer.train(0, 3)
    batches = trainer.feed.peek()
    with rolled_back(trainer):
        for _ in range(2):
            trainer.update(batches)
        if is_dropped:
            trainer.step.drop()
    trainer.train(3, 8)
    assert losses == expected


def other(mode):
    return {"eager": "graph", "graph": "eager"}[mode]


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:.*param `maximize` takes effect:FutureWarning")
@pytest.mark.parametrize("optimizer_name", slow_but(OPTIMIZERS, "adamw"))
def test_switching_modes_and_back_continues_the_curve(mode, optimizer_name):
    data = toy.batches(12, ignored=0.4)
    expected = straight_losses(mode, optimizer_name, data, 12)

    trainer = build(mode, optimizer_name, data)
    losses = toy.record_losses(trainer)
    trainer.train(0, 3)
    trainer.switch_to(other(mode))
    trainer.train(3, 6)
    trainer.switch_to(mode)
    trainer.train(6, 9)
    assert trainer.optimizer._state["step"] == 9
    another = build(mode, optimizer_name, data)
    another.model.load_state_dict(trainer.model.state_dict())
    another.load_state_dict(trainer.state_dict())
    losses += toy.losses_of(another, 12, 9)
    # measured: 0 for most optimizers, up to 3e-7 if float32 sums have a different order
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


@pytest.mark.e2e
def test_forgetting_the_optimizer_state_would_be_noticed():
    """Negative control."""
    data = toy.batches(12)
    expected = straight_losses("eager", "adamw", data, 12)
    trainer = build("eager", "adamw", data)
    losses = toy.record_losses(trainer)
    trainer.train(0, 4)
    for parameter in trainer.model.parameters():
        trainer.optimizer._state[parameter] = {}
    trainer.optimizer._state["step"] = 0
    trainer.switch_to("graph")
    trainer.train(4, 12)
    assert np.max(np.abs(np.array(losses) / expected - 1)) > 1e-4


def test_a_hook_that_cannot_work_in_the_other_mode_prevents_the_switch():
    trainer = build("eager", "sgd", toy.batches(4))
    trainer.register_hooks([CallbackHook(after_backward=lambda t: None)])
    trainer.train(0, 2)
    with refused("after_backward"):
        trainer.switch_to("graph")
    trainer.train(2, 4)
    assert trainer.status == "finished"


def test_an_unknown_mode_is_refused():
    with refused("'lazy'.*eager or graph"):
        build("eager", "sgd", toy.batches(1)).switch_to("lazy")


def test_a_trainer_with_custom_methods_is_not_switched():
    class Own(EagerTrainer):
        def run_step(self):
            super().run_step()

    trainer = toy.make_trainer(Own)
    with refused("Own cannot switch to graph mode.*overridden methods"):
        trainer.switch_to("graph")


def test_a_switch_releases_the_graph():
    trainer = build("graph", "adamw", toy.batches(2))
    trainer.train(0, 1)
    graph = weakref.ref(trainer.graph)
    trainer.switch_to("eager")
    gc.collect()
    assert graph() is None and trainer.mode == "eager"


class ReadsValues(toy.Tagger):
    """A model that reads the values of a tensor, so it cannot be compiled."""

    def forward(self, x, y):
        largest = float(x.numpy().max())
        return super().forward(x / largest, y)


def test_a_switch_that_cannot_be_compiled_goes_back_to_the_old_mode(monkeypatch):
    data = toy.batches(12)
    monkeypatch.setattr(toy, "Tagger", ReadsValues)
    straight, trainer = build("eager", "adamw", data), build("eager", "adamw", data)
    expected, losses = toy.record_losses(straight), toy.record_losses(trainer)
    straight.train(0, 8)
    trainer.train(0, 4)
    trainer.switch_to("graph")
    with refused("graph"):
        trainer.train(4, 8)
    assert trainer.mode == "eager" and trainer.graph is None
    trainer.train(4, 8)
    assert losses == expected
