"""Buffers that forward changes come back from a checkpoint file, in the same mode and in the other."""

from __future__ import annotations

import pytest
import stateful_models as sm
import stateful_ranks
from toy import record_losses

from libai.engine.trainer.checkpointer import TrainerCheckpointer

pytestmark = pytest.mark.dist

BOUND = 1e-5


@pytest.mark.parametrize("first", ["eager", "graph"])
def test_buffers_come_back_from_a_file_in_either_mode(tmp_path, first, mode):
    stateful_ranks.save_half("observed", first, tmp_path)
    assert stateful_ranks.resumed("observed", mode, tmp_path) <= BOUND
    # the control: without the file the second half is another
    trainer = stateful_ranks.trainer_of("observed", mode, (1, 1, 1))
    losses = record_losses(trainer)
    trainer.train(0, 1)
    assert abs(losses[0] / sm.right("observed")[0][2] - 1) > 1e-2


def test_the_file_holds_the_buffers_exactly(tmp_path, mode):
    trainer = stateful_ranks.trainer_of("observed", mode, (1, 1, 1))
    trainer.train(0, 3)
    TrainerCheckpointer(trainer, tmp_path).save()
    other = stateful_ranks.trainer_of("observed", mode, (1, 1, 1))
    TrainerCheckpointer(other, tmp_path).resume()
    for (name, one), (_, saved) in zip(trainer.model.named_buffers(), other.model.named_buffers()):
        assert (one.numpy() == saved.numpy()).all(), name
    assert int(other.model.layers[1].between.count.numpy()[0]) == 3
