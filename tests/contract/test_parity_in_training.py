"""`train.rehearse` and `train.rehearse_every` look at a training and leave no trace in it."""

from __future__ import annotations

import json

import numpy as np
import oneflow as flow
import pytest
import toy
from contract_runs import make_config, make_run, train
from oneflow import nn

from libai.config import LazyCall, validate
from libai.engine import Run, default_setup
from libai.engine.graph.graphs import StepInputs
from libai.engine.hooks import ShadowUpdateHook
from libai.engine.trainer import model_trainer
from libai.layers import Dropout
from libai.oneflow_fixes.internals import is_tracing
from libai.utils.errors import UserError

pytestmark = pytest.mark.e2e
NO_EVALUATION = "train.evaluation.enabled=false"


class Averaging(toy.Classifier):
    """Dropout, a buffer that forward changes and numbers that the data set draws."""

    def __init__(self):
        super().__init__()
        self.drop = Dropout(0.2)
        self.register_buffer("average", flow.zeros(16))

    def forward(self, x, y):
        hidden = self.drop(flow.relu(self.a(x)))
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        logits = self.b(hidden - self.average.clone())
        return {"losses": {"cls": nn.functional.cross_entropy(logits, y)}}


class Centred(toy.Classifier):
    """Mixes the samples of a batch."""

    def forward(self, x, y):
        return super().forward(x - x.mean(0, keepdim=True), y)


def drawing(count=3):
    """Batches from NumPy's global generator, by a loader that has no position."""

    class Loader:
        def __iter__(self):
            for _ in range(count):
                yield {"x": np.random.randn(8, 8).astype(np.float32), "y": np.random.randint(0, 4, 8)}

    return Loader()


def curve(tmp_path, mode, name, *overrides, loader=None, model=Averaging):
    config = make_config(tmp_path / name, mode, NO_EVALUATION, "train.train_iter=5", *overrides)
    config.model = LazyCall(model)()
    if loader is not None:
        config.dataloader.train = LazyCall(loader)()
    run = Run(default_setup(validate(config)))
    run.train()
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    arrays = [t.numpy() for t in [*run.model.parameters(), *run.model.buffers()]]
    return run, rows, arrays


def numbers(rows, tag):
    return [row[tag] for row in rows if tag in row]


@pytest.mark.parametrize("loader", [None, drawing])
def test_a_checked_run_has_the_same_curve(mode, loader, tmp_path):
    plain = curve(tmp_path, mode, "plain", loader=loader)
    assert "rehearse: " not in (tmp_path / "plain" / "log.txt").read_text()
    words = ["train.rehearse=3"] + (["train.rehearse_every=2"] if mode == "graph" else [])
    checked = curve(tmp_path, mode, "checked", *words, loader=loader)
    assert "rehearse: eager and graph mode agree over 3 iteration(s)" in (tmp_path / "checked" / "log.txt").read_text()
    assert numbers(checked[1], "train/loss") == numbers(plain[1], "train/loss")
    assert len(numbers(plain[1], "train/loss")) == 5
    assert all(np.array_equal(a, b) for a, b in zip(plain[2], checked[2], strict=True))
    if mode == "graph":
        shadows = numbers(checked[1], "parity/max_rel_diff")
        assert len(shadows) >= 2 and max(shadows) < 1e-5


class TwiceInGraphs(nn.Module):
    def forward(self, x):
        return x * 2 if is_tracing() else x


class Wrong(toy.Classifier):
    def __init__(self, is_wrong=True):
        super().__init__()
        self.middle = TwiceInGraphs() if is_wrong else nn.Identity()

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(self.middle(flow.relu(self.a(x)))), y)}}


def test_another_training_ends_before_its_first_update(mode, tmp_path):
    with pytest.raises(UserError, match="another training") as raised:
        curve(tmp_path, mode, "run", "train.rehearse=2", model=Wrong)
    text = str(raised.value)
    assert "\n" not in text and "iteration 1" in text and "it begins in middle (forward" in text, text
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()


class Branching(toy.Classifier):
    def forward(self, x, y):
        return super().forward(x if x.sum() > 0 else -x, y)


def test_a_model_that_the_other_mode_refuses_trains_on(tmp_path):
    run, rows, _ = curve(tmp_path, "eager", "run", "train.rehearse=2", model=Branching)
    text = "train.rehearse=2 has nothing to compare with: graph mode refuses this run (Branching"
    assert text in (tmp_path / "run" / "log.txt").read_text()
    assert len(numbers(rows, "train/loss")) == 5


def test_the_shadow_update_sees_a_wrong_step(tmp_path, monkeypatch):
    """Rates that stay what they were in the first iteration."""
    write = StepInputs.set

    def write_once(self, group, **values):
        write(self, group, **{name: value for name, value in values.items() if (name, group) not in self._values})

    monkeypatch.setattr(StepInputs, "set", write_once)
    _, rows, _ = curve(tmp_path, "graph", "run", "train.rehearse_every=1")
    assert max(numbers(rows, "parity/max_rel_diff")) > 1e-4


def test_the_shadow_update_refuses_another_precision(monkeypatch):
    monkeypatch.setattr(model_trainer, "AMP_DEVICES", ("cpu",))
    model = toy.Classifier()
    trainer = toy.trainer_of("graph", model, toy.batches(2), toy.optimizer_of("sgd", model), amp="fp16")
    trainer.register_hooks([ShadowUpdateHook(1)])
    with pytest.raises(UserError, match=r"repeats the update op by op in float32, and amp=fp16 computes in fp16"):
        trainer.train(0, 1)


def test_a_resumed_run_is_checked_where_it_stands(mode, tmp_path):
    whole = train(tmp_path / "whole", mode)
    make_run(tmp_path / "run", mode).train(until=4)
    train(tmp_path / "run", mode, "train.rehearse=2", resume=True)
    assert "rehearse: eager and graph mode agree over 2 iteration(s)" in (tmp_path / "run" / "log.txt").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [json.loads(line) for line in (whole.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert numbers(rows, "train/loss") == numbers(expected, "train/loss")


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"train\.rehearse_every cannot be honoured in eager mode"):
        make_run(tmp_path, "eager", "train.rehearse_every=1")
    for words in ("train.rehearse=-1", "train.rehearse_every=-1", "train.rehearse=1.5"):
        with pytest.raises(UserError, match=words.partition("=")[0]):
            make_run(tmp_path, "graph", words)
