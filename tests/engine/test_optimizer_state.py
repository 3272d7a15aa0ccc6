"""Users can read and store the optimizer state in graph mode in the same way as in eager mode."""

import pytest
import toy
from numpy.testing import assert_allclose

from libai.optim import export_state
from libai.scheduler import WarmupCosineLR
from libai.utils.errors import UserError

BATCHES = toy.batches(12)


def new_trainer(mode, optimizer="adamw"):
    def schedule(optimizer):
        return WarmupCosineLR(optimizer, max_iter=12, warmup_iter=2)

    return toy.make_trainer(mode, BATCHES, optimizer=optimizer, schedule=schedule)


@pytest.mark.promise
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.e2e)])
def test_model_and_trainer_state_continue_bit_for_bit(mode, optimizer):
    """Save the model's state and the trainer's state, as for detectron2's trainers."""
    whole, first = new_trainer(mode, optimizer), new_trainer(mode, optimizer)
    whole.train(0, 11)
    first.train(0, 5)
    second = new_trainer(mode, optimizer)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    for trainer in (first, second):  # the two trainers share nothing
        trainer.train(5, 11)
        assert toy.are_equal(toy.weights_of(trainer), toy.weights_of(whole))


@pytest.mark.e2e
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_optimizer_shows_its_state_in_both_modes(optimizer):
    found = {}
    for mode in ("eager", "graph"):
        trainer = new_trainer(mode, optimizer)
        trainer.train(0, 5)
        state = trainer.optimizer.state_dict()["state"]
        found[mode] = {
            (i, key): value.numpy().copy() for i in range(4) for key, value in state[i].items()
        }
    assert found["eager"].keys() == found["graph"].keys() and found["eager"]
    for key, value in found["eager"].items():
        assert_allclose(found["graph"][key], value, rtol=1e-5, atol=1e-7)


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
    with pytest.raises(
        UserError, match=r"3 updates but has no state.*trainer.optimizer_state.export\(\)"
    ):
        export_state(trainer.optimizer, dict(trainer.model.named_parameters()))
