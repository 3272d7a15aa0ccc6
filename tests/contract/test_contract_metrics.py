"""Metrics, losses and the finite check, in both modes (FEATURES A1 rows 12-16, A4 B1, B2; LiBai
defects 3, 7).
"""

import logging

import numpy as np
import pytest
from contract_runs import train
from jobs import read_metrics
from oneflow import nn
from refusals import refused
from toy import make_trainer

from libai.engine.events.writers import AsyncWriter, Writer
from libai.engine.hooks import WriterHook
from libai.utils.logging import reset_logging


class TwoLosses(nn.Module):
    """Two components, neither of them named "loss", and a metric."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.a, self.weight = nn.Linear(8, 4), weight

    def forward(self, x, y):
        logits = self.a(x)
        losses = {
            "cls": nn.functional.cross_entropy(logits, y) * self.weight,
            "penalty": (logits * logits).mean(),
        }
        return {"losses": losses, "metrics": {"size": logits.abs().mean()}}


class Recording(Writer):
    """A writer that stores the records."""

    def __init__(self, fails_at=None):
        self.records, self.fails_at = [], fails_at

    def write(self, record):
        if record.iter == self.fails_at:
            raise OSError("disk full")
        self.records.append(record)


# ------------------------------------------------------------------------------- losses and metrics


def test_the_total_is_the_sum_of_the_losses_and_each_is_logged(mode):
    trainer = make_trainer(mode, model=TwoLosses)
    trainer.train(0, 2)
    metrics = trainer.fetch_metrics()
    assert metrics["train/loss"] == pytest.approx(
        metrics["train/cls"] + metrics["train/penalty"], rel=1e-6
    )
    assert metrics["train/size"] > 0
    assert metrics["train/lr"] == 0.01


def test_every_component_is_differentiated_whatever_its_name(mode):
    """LiBai sums only outputs with "loss" in their names.

    Here only the penalty can change the weights.
    """
    trainer = make_trainer(mode, model=lambda: TwoLosses(0.0), optimizer="sgd")
    before = trainer.model.a.weight.numpy().copy()
    trainer.train(0, 2)
    assert np.abs(trainer.model.a.weight.numpy() - before).max() > 1e-4


# --------------------------------------------------------------------------------- the finite check


# ----------------------------------------------------------------------------------------------
# writing


def test_metrics_are_fetched_only_at_log_points(mode, monkeypatch):
    """detectron2 and LiBai wait for the device in every iteration."""
    trainer, fetched = make_trainer(mode), []
    collect = trainer.collect
    monkeypatch.setattr(
        trainer, "collect", lambda results: fetched.append(len(results)) or collect(results)
    )
    writer = Recording()
    trainer.register_hooks([WriterHook([writer], period=4)])
    trainer.prepare()  # this also fetches metrics, to check losses
    fetched.clear()
    trainer.train(0, 10)
    assert fetched == [4, 4, 2]  # the last iteration is always written
    assert [record.iter for record in writer.records] == [4, 8, 10]


def test_log_period_makes_a_trainer_without_writers_print(mode, capsys, monkeypatch, request):
    trainer = make_trainer(mode)
    monkeypatch.setattr(
        logging.getLogger("libai"), "handlers", []
    )  # without the handlers of pytest
    request.addfinalizer(reset_logging)
    trainer.train(0, 2)
    assert capsys.readouterr().out == ""
    trainer.train(2, 8, log_period=4)
    trainer.train(8, 10, log_period=1)  # each line once
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    lines = [(line[1], line[2]) for line in printed if line[0] == "iter"]
    assert lines == [("4/8", "loss"), ("8/8", "loss"), ("9/10", "loss"), ("10/10", "loss")]
    with refused("log_period=0: a size must be a whole number >= 1"):
        trainer.train(10, 12, log_period=0)


@pytest.mark.parametrize("fails_at", [2, 3])
def test_an_error_of_the_writing_thread_ends_the_run(mode, fails_at):
    """detectron2 drops the future and thus the error (FEATURES B1).

    An error of the last write is raised at the end.
    """
    trainer = make_trainer(mode)
    trainer.register_hooks([WriterHook([AsyncWriter(Recording(fails_at))], period=1)])
    with pytest.raises(OSError, match="disk full"):
        trainer.train(0, 3)


def test_async_write_metrics_reaches_the_file(mode, tmp_path):
    train(tmp_path, mode, "train.async_write_metrics=true")
    assert [row["iter"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]
