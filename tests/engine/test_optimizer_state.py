"""Optimizer state as users read and store it: in graph mode as in eager mode."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
import toy

from libai.optim import export_state
from libai.scheduler import WarmupCosineLR
from libai.utils.errors import UserError

BATCHES = toy.batches(12)
OTHER = {"eager": "graph", "graph": "eager"}


def new_trainer(mode, optimizer="adamw"):
    flow.manual_seed(0)
    model = toy.Classifier()
    built = toy.optimizer_of(optimizer, model)
    schedule = WarmupCosineLR(built, max_iter=12, warmup_iter=2)
    return toy.trainer_of(mode, model, BATCHES, built, lr_scheduler=schedule)


def weights(trainer):
    return {name: parameter.numpy() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.promise
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.e2e)])
def test_model_and_trainer_state_continue_bit_for_bit(mode, optimizer):
    """As detectron2's trainers are saved: the model's state and the trainer's."""
    whole, first = new_trainer(mode, optimizer), new_trainer(mode, optimizer)
    whole.train(0, 11)
    first.train(0, 5)
    saved = first.model.state_dict(), first.state_dict()
    second = new_trainer(mode, optimizer)
    second.model.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    second.train(5, 11)
    for name, value in weights(whole).items():
        np.testing.assert_array_equal(weights(second)[name], value, err_msg=name)


@pytest.mark.e2e
def test_the_state_of_one_mode_continues_in_the_other(mode):
    first = new_trainer(mode)
    first.train(0, 5)
    other = new_trainer(OTHER[mode])
    other.model.load_state_dict(first.model.state_dict())
    other.load_state_dict(first.state_dict())
    other.train(5, 11)
    whole = new_trainer("eager")
    whole.train(0, 11)
    for name, value in weights(whole).items():
        # one mode's kernels may round otherwise; docs/modes.md promises 1e-5
        np.testing.assert_allclose(weights(other)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.e2e
def test_a_state_without_the_optimizer_would_be_noticed(mode):
    """Negative control."""
    whole, first = new_trainer(mode), new_trainer(mode)
    whole.train(0, 11)
    first.train(0, 5)
    second = new_trainer(mode)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict({**first.state_dict(), "optimizer": second.state_dict()["optimizer"]})
    second.train(5, 11)
    assert any(np.abs(weights(second)[name] - value).max() > 1e-4 for name, value in weights(whole).items())


@pytest.mark.e2e
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_optimizer_shows_its_state_in_both_modes(optimizer):
    found = {}
    for mode in OTHER:
        trainer = new_trainer(mode, optimizer)
        trainer.train(0, 5)
        state = trainer.optimizer.state_dict()["state"]
        found[mode] = {(i, key): value.numpy().copy() for i in range(4) for key, value in state[i].items()}
        trainer.train(5, 6)  # reading disturbs nothing
    assert found["eager"].keys() == found["graph"].keys() and found["eager"]
    for key, value in found["eager"].items():
        np.testing.assert_allclose(found["graph"][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.e2e
def test_reading_the_state_does_not_change_training():
    one, other = new_trainer("graph"), new_trainer("graph")
    for trainer, reads in ((one, False), (other, True)):
        for start in range(0, 9, 3):
            trainer.train(start, start + 3)
            if reads:
                trainer.optimizer.state_dict()
    for name, value in weights(one).items():
        np.testing.assert_array_equal(weights(other)[name], value)


@pytest.mark.e2e
def test_an_optimizer_shows_its_own_state_again_after_a_switch():
    trainer = new_trainer("graph")
    trainer.train(0, 3)
    trainer.switch_to("eager")
    assert "state_dict" not in vars(trainer.optimizer)
    assert trainer.optimizer.state_dict()["state"][0]["exp_avg"].numpy().any()


def test_exporting_state_that_is_in_a_graph_is_refused():
    trainer = new_trainer("graph")
    trainer.train(0, 3)
    with pytest.raises(UserError, match=r"3 updates and holds no state.*trainer.optimizer_state.export\(\)"):
        export_state(trainer.optimizer, dict(trainer.model.named_parameters()))
