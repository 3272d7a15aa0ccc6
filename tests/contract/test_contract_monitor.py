"""The numbers of `train.monitor`: update ratios, gradients and their noise, sudden losses."""

from __future__ import annotations

import json
import logging

import contract_runs
import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.engine.hooks import CallbackHook, GradientsHook, LossSpikeHook
from libai.utils.errors import UserError

FEW = ("graph.check_first_step=false", "train.evaluation.enabled=false", "train.checkpointer.enabled=false")


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_update_ratios_are_logged_by_group(mode, tmp_path):
    few = (*FEW, "train.train_iter=4", "train.log_period=2", "train.monitor.update_ratio=true")
    run = contract_runs.make_run(tmp_path, mode, *few)
    groups = [list(group.parameters) for group in run.optimizer.param_groups]
    history = []

    def note(trainer):
        history.append([np.concatenate([p.numpy().ravel() for p in group]) for group in groups])

    run.trainer.register_hooks([CallbackHook(before_train=note, after_step=note)])
    run.train()
    for row, (before, after) in zip(records(tmp_path), [history[1:3], history[3:5]]):
        for index in range(2):
            expected = np.linalg.norm(after[index] - before[index]) / np.linalg.norm(before[index])
            np.testing.assert_allclose(row[f"train/update_ratio/{index}"], expected, rtol=1e-4)


def test_gradients_and_their_noise_are_measured_or_refused(mode, tmp_path):
    few = (*FEW, "train.train_iter=4", "train.log_period=2", "train.monitor.gradients=true")
    few = (*few, "train.clip_grad.max_norm=1000.0")
    if mode == "graph":
        with pytest.raises(UserError, match="train.monitor.gradients cannot be honoured in graph mode"):
            contract_runs.make_run(tmp_path, mode, *few)
        return
    contract_runs.make_run(tmp_path, mode, *few).train()
    for row in records(tmp_path):
        joint = np.hypot(row["train/grad_norm/0"], row["train/grad_norm/1"])
        np.testing.assert_allclose(joint, row["train/grad_norm"], rtol=1e-5)


class Mean(nn.Module):
    """Its gradient is `-x` averaged over the batch: mean 1 and variance `noise`² in each of 500 numbers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(flow.zeros(500))

    def forward(self, x):
        return {"losses": {"a": -(self.w * x).sum(1).mean()}}


@pytest.mark.parametrize("steps", [1, 2])
def test_the_noise_scale_is_that_of_the_samples(steps):
    rng = np.random.RandomState(0)
    batches = [{"x": (1 + 3 * rng.randn(8, 500)).astype(np.float32)} for _ in range(60 * steps)]
    model = Mean()
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01)
    trainer = toy.trainer_of("eager", model, batches, optimizer, num_accumulation_steps=steps)
    trainer.register_hooks([GradientsHook(2, samples=8 * steps)])
    trainer.train(0, 60)
    assert trainer.storage.get("train/noise_scale")[0] == pytest.approx(9.0, rel=0.15)  # tr(Σ)/|G|² = 500·9 / 500


def test_a_sudden_loss_is_named(mode, caplog):
    batches = toy.batches(1) * 60
    batches[40] = {**batches[0], "x": batches[0]["x"] * 50}
    model = toy.Classifier()
    trainer = toy.trainer_of(mode, model, batches, flow.optim.SGD(model.parameters(), lr=1e-4))
    hook = LossSpikeHook(20)
    trainer.register_hooks([hook])
    with caplog.at_level(logging.WARNING, "libai.engine"):
        trainer.train(0, 60)
    assert [message for message in caplog.messages if "the loss of iteration" in message] == [
        message for message in caplog.messages if message.startswith("the loss of iteration 41 is")
    ]
    assert trainer.storage.get("train/loss_spikes")[0] == 1
    state = hook.state_dict()
    assert (state["seen"], state["count"], len(state["recent"])) == (60, 1, 60)
    resumed = LossSpikeHook(20)
    resumed.load_state_dict(state)
    resumed.trainer = trainer
    assert resumed.state_dict() == state
