"""Buffers that forward changes survive a change of mode, and an eager run names state that no
checkpoint contains.
"""

import faults
import pytest
import toy


def trainer_of(name, mode):
    fault = faults.FAULTS[name]
    model, optimizer = faults.build(fault)
    data = faults.batches(faults.UPDATES * fault.accumulation)
    return toy.trainer_of(mode, model, data, optimizer, num_accumulation_steps=fault.accumulation)


@pytest.mark.promise
def test_buffers_are_carried_over_switches(mode):
    other = {"eager": "graph", "graph": "eager"}[mode]
    trainer = trainer_of("buffer, assign", mode)
    losses = toy.record_losses(trainer)
    trainer.train(0, 2)
    for target in (other, mode):
        trainer.switch_to(target)
        trainer.train(trainer.iter, trainer.iter + 1)
    expected, state = faults.plain_loop(faults.FAULTS["buffer, assign"])
    assert faults.distance(losses, expected) < 1e-5
    assert faults.distance_of_states(faults.state_of(trainer.model), state) < 1e-5


def test_a_changing_buffer_that_is_not_saved_is_named(mode, caplog):
    trainer = trainer_of("a buffer that no checkpoint holds", mode)
    trainer.train(0, 1)
    assert "changes the buffer middle.unsaved (Planted)" in caplog.text
    assert "persistent=False" in caplog.text and "buffer middle.average" not in caplog.text


@pytest.mark.parametrize(
    ("name", "named"), [("an average in an attribute", True), ("a cached mask", False)]
)
def test_an_eager_run_names_tensors_that_no_checkpoint_holds(caplog, name, named):
    trainer_of(name, "eager").train(0, 2)
    assert ("which no checkpoint contains" in caplog.text) == named
