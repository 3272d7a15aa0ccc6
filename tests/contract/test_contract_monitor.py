"""Loss spikes (`train.monitor`): they are found, counted, left out, undone, or end a run."""

from __future__ import annotations

import logging

import contract_runs
import jobs
import numpy as np
import oneflow as flow
import pytest
import toy

from libai.engine.hook_base import StopTraining
from libai.engine.hooks import CallbackHook, LossSpikeHook
from libai.engine.hooks.bad_losses import LossSpike
from libai.utils.errors import UserError

pytestmark = pytest.mark.e2e


def spiky(bad, count=60):
    """Batches of which those in `bad` are 50 times as large as the others."""
    batches = toy.batches(1) * count
    return [{**batch, "x": batch["x"] * 50} if i in bad else batch for i, batch in enumerate(batches)]


def build(mode, batches, *hooks, **options):
    flow.manual_seed(0)
    model = toy.Classifier()
    optimizer = flow.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    trainer = toy.trainer_of(mode, model, batches, optimizer, **{"keeps_copy": True, **options})
    trainer.register_hooks(hooks)
    return trainer


def by_hand(mode, batches, updates):
    """A trainer that made these updates and no others."""
    trainer = build(mode, batches)
    for index in updates:
        trainer.iter = index
        trainer.update([batches[index]])
    return trainer


def assert_same_weights(trainer, expected):
    for now, then in zip(trainer.model.parameters(), expected.model.parameters()):
        assert np.array_equal(now.numpy(), then.numpy())


def spike_lines(caplog):
    return [message for message in caplog.messages if "the loss of iteration" in message]


def test_a_sudden_loss_is_named(mode, caplog):
    trainer = build(mode, spiky([40]), LossSpikeHook(20))
    with caplog.at_level(logging.WARNING, "libai.engine"):
        trainer.train(0, 60)
    (line,) = spike_lines(caplog)
    assert line.startswith("the loss of iteration 41 is") and "left out" not in line
    assert trainer.storage.get("train/loss_spikes")[0] == 1
    assert_same_weights(trainer, by_hand(mode, spiky([40]), range(60)))


def test_updates_of_loss_spikes_are_left_out(mode, caplog):
    """As in a run that never made them; also two in one log period, and the last iteration of one."""
    bad = [21, 25, 39]
    trainer = build(mode, spiky(bad), LossSpikeHook(20, action="skip"))
    with caplog.at_level(logging.WARNING, "libai.engine"):
        trainer.train(0, 60)
    assert [line.endswith("its update is left out") for line in spike_lines(caplog)] == [True] * 3
    assert trainer.status == "finished" and trainer.storage.get("train/loss_spikes")[0] == 3
    assert_same_weights(trainer, by_hand(mode, spiky(bad), [i for i in range(60) if i not in bad]))


def test_a_loss_spike_brings_the_last_good_state_back(mode):
    """Seen at the log point 40; the copy is that of the beginning, since which there were fewer than 50 iterations."""
    trainer = build(mode, spiky([25]), LossSpikeHook(20, action="rollback"))
    trainer.train(0, 60)
    assert_same_weights(trainer, by_hand(mode, spiky([25]), range(40, 60)))


def test_a_loss_spike_ends_training_with_the_weights_before_it(mode):
    trainer = build(mode, spiky([25]), LossSpikeHook(20, action="raise"))
    with pytest.raises(LossSpike, match=r"loss of iteration 26 is .*loss_spike_action=raise.*Its update was undone"):
        trainer.train(0, 60)
    assert_same_weights(trainer, by_hand(mode, spiky([25]), range(25)))


def test_loss_spikes_in_a_row_end_training(mode):
    trainer = build(mode, spiky([20, 21, 25, *range(31, 60)]), LossSpikeHook(1, action="skip"))
    with pytest.raises(LossSpike, match=r"iteration 41 is .*10 losses in a row were spikes"):
        trainer.train(0, 60)


def test_a_trainer_without_a_copy_of_its_state_cannot_undo_spikes(mode):
    trainer = build(mode, spiky([]), LossSpikeHook(20, action="skip"), keeps_copy=False)
    with pytest.raises(UserError, match=r"keeps no copy.*keeps_copy=True"):
        trainer.train(0, 60)


def test_a_run_that_undoes_loss_spikes_resumes_exactly(mode, tmp_path):
    """The spike comes soon after the checkpoint, so that it is judged by losses from before it."""
    settings = (
        *("train.rehearse=0", "train.evaluation.enabled=false", "train.log_period=4"),
        *("train.checkpointer.period=24", "train.monitor.loss_spike=6", "train.monitor.loss_spike_action=rollback"),
        *("train.train_iter=32", "dataloader.train.shuffle=false"),
        "dataloader.train.dataset._target_=test_contract_monitor.dataset",
        "+dataloader.train.dataset.outlier=26",
    )
    straight = contract_runs.train(tmp_path / "a", mode, *settings)

    def stop(trainer):
        if trainer.iter + 1 == 24:
            raise StopTraining("half of it")

    first = contract_runs.make_run(tmp_path / "b", mode, *settings)
    first.trainer.register_hooks([CallbackHook(after_step=stop)])
    first.train()
    resumed = contract_runs.train(tmp_path / "b", mode, *settings, resume=True)
    assert_same_weights(resumed.trainer, straight.trainer)
    assert [jobs.read_metrics(tmp_path / run)[-1]["train/loss_spikes"] for run in "ab"] == [1, 1]
    assert len(straight.trainer.optimizer.param_groups) == 2 and straight.trainer.optimizer._state["step"] == 28


def dataset(count, outlier):
    """Samples for 32 iterations, of which those of one are far from all others."""
    data = contract_runs.dataset(256)
    data["x"][8 * outlier : 8 * outlier + 8] *= 50
    return data
