"""Buffers that forward changes survive a change of mode, and an eager run names state that no
checkpoint contains.
"""

import faults
import pytest
from parity_cases import build_trainer, compare, plain_loop, record, result_of


def trainer_of(name, mode):
    return build_trainer(faults.case_of(faults.FAULTS[name]), mode, rehearse=None)


@pytest.mark.promise
def test_buffers_are_carried_over_switches(mode):
    other = {"eager": "graph", "graph": "eager"}[mode]
    trainer = trainer_of("buffer, assign", mode)
    lines = record(trainer)
    trainer.train(0, 2)
    for target in (other, mode):
        trainer.switch_to(target)
        trainer.train(trainer.iter, trainer.iter + 1)
    expected = plain_loop(faults.case_of(faults.FAULTS["buffer, assign"]))
    apart = compare(result_of(trainer, lines), expected)
    assert max(apart.loss, apart.weights) < 1e-5


def test_a_changing_buffer_that_is_not_saved_is_named(mode, caplog):
    trainer = trainer_of("a buffer that no checkpoint holds", mode)
    trainer.train(0, 1)
    assert "changes the buffer middle.unsaved (Planted)" in caplog.text
    assert "persistent=False" in caplog.text and "buffer middle.average" not in caplog.text


@pytest.mark.parametrize("name, named", [("an average in an attribute", True), ("a lock", False)])
def test_an_eager_run_names_tensors_that_no_checkpoint_holds(caplog, name, named):
    trainer_of(name, "eager").train(0, 2)
    assert ("which no checkpoint contains" in caplog.text) == named
