"""`train.rehearse` and `train.rehearse_every` refuse a run that trains differently and do not
change a correct one.
"""

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_config, make_run, train, weights
from jobs import read_column
from oneflow import nn
from refusals import refused
from toy import Classifier, are_equal, batches, make_trainer

from libai.config import LazyCall, validate
from libai.engine import Run, default_setup
from libai.engine import trainer as trainer_module
from libai.engine.compiled.step import CompiledStep
from libai.engine.hooks import CallbackHook
from libai.engine.rehearsal import reference
from libai.engine.rehearsal.rehearsal import NotTheSame
from libai.layers import Dropout
from libai.patches.internals import is_tracing
from libai.utils.distributed import get_rank

pytestmark = pytest.mark.e2e
#: a rehearsal as a run has it by default
USUAL = ("train.evaluation.enabled=false", "train.rehearse=null")


class Averaging(Classifier):
    """Has dropout, a buffer that forward changes, and random numbers from the dataset."""

    def __init__(self):
        super().__init__()
        self.drop = Dropout(0.2)
        self.register_buffer("average", flow.zeros(16))

    def forward(self, x, y):
        hidden = self.drop(flow.relu(self.a(x)))
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        logits = self.b(hidden - self.average.clone())
        return {"losses": {"cls": nn.functional.cross_entropy(logits, y)}}


class Dropping(Classifier):
    """A classifier with dropout, for tests on several ranks."""

    def __init__(self):
        super().__init__()
        self.drop = Dropout(0.2)

    def forward(self, x, y):
        return super().forward(self.drop(x), y)


class ByRank(Classifier):
    """Computes a different loss on every rank, for tests on several ranks."""

    def forward(self, x, y):
        return super().forward(x * (1.0 + get_rank()), y)


def drawing(count=3):
    """Return a loader without a position, with batches from NumPy's global generator."""

    class Loader:
        def __iter__(self):
            for _ in range(count):
                yield {
                    "x": np.random.randn(8, 8).astype(np.float32),
                    "y": np.random.randint(0, 4, 8),
                }

    return Loader()


def curve(tmp_path, mode, name, *overrides, loader=None, model=Averaging):
    config = make_config(tmp_path / name, mode, *USUAL, "train.train_iter=5", *overrides)
    config.model = LazyCall(model)()
    if loader is not None:
        config.dataloader.train = LazyCall(loader)()
    run = Run(default_setup(validate(config)))
    run.train()
    return run, read_column(tmp_path / name)


@pytest.mark.parametrize("loader", [None, drawing])
def test_a_rehearsed_run_has_the_same_curve(mode, loader, tmp_path):
    plain = curve(tmp_path, mode, "plain", "train.rehearse=0", loader=loader)
    checked = curve(
        tmp_path, mode, "checked", "train.rehearse=3", "train.rehearse_every=2", loader=loader
    )
    assert checked[1] == plain[1] and len(plain[1]) == 5
    assert are_equal(weights(checked[0]), weights(plain[0]))


@pytest.mark.parametrize(
    "words, expected",
    [
        (["train.rehearse=2", "train.rehearse_every=4"], [2, 1]),
        (["train.train_iter=1"], [1]),
        (["train.rehearse=0"], []),
    ],
)
def test_the_requested_number_of_updates_is_rehearsed(words, expected, tmp_path, monkeypatch):
    made = []
    run = reference._make

    def make(*args, **kwargs):
        made.append(len(args[1]))
        return run(*args, **kwargs)

    monkeypatch.setattr(reference, "_make", make)
    curve(tmp_path, "graph", "run", *words, model=Classifier)
    assert made == expected


class TwiceInGraphs(nn.Module):
    def forward(self, x):
        return x * 2 if is_tracing() else x


class Wrong(Classifier):
    def __init__(self, is_wrong=True):
        super().__init__()
        self.middle = TwiceInGraphs() if is_wrong else nn.Identity()

    def forward(self, x, y):
        return {
            "losses": {
                "cls": nn.functional.cross_entropy(self.b(self.middle(flow.relu(self.a(x)))), y)
            }
        }


def test_a_run_that_trains_differently_ends_before_its_first_update(tmp_path):
    with pytest.raises(
        NotTheSame, match="would train a different model than eager mode: in update 1 the loss"
    ) as raised:
        curve(tmp_path, "graph", "run", model=Wrong)
    assert "\n" not in str(raised.value)
    assert (
        not (tmp_path / "run" / "checkpoints").exists()
        and not (tmp_path / "run" / "metrics.jsonl").exists()
    )


def test_a_run_falls_back_to_eager_mode_if_allowed(tmp_path):
    run, losses = curve(tmp_path, "graph", "run", "graph.on_build_error=eager", model=Wrong)
    assert (
        run.trainer.mode == "eager"
        and "the graph could not train the same model" in run.mode_reason
    )
    assert len(losses) == 5


def write_rates_once(monkeypatch):
    """Learning rates stay as they were in the first compiled update."""
    write = CompiledStep._set_step_inputs

    def write_once(self):
        rates = {
            name: rate
            for name, rate in self._step_inputs.items()
            if name.startswith("lr") and rate.numpy().any()
        }
        write(self)
        self._step_inputs.update(rates)

    monkeypatch.setattr(CompiledStep, "_set_step_inputs", write_once)


@pytest.mark.parametrize(
    "words, when", [((), 0), (("train.rehearse=1", "train.rehearse_every=3"), 2)]
)
def test_a_wrong_update_of_the_optimizer_is_refused(words, when, tmp_path, monkeypatch):
    """The error comes at the start, or during the run if nothing was compared before."""
    write_rates_once(monkeypatch)
    with pytest.raises(NotTheSame, match=r"in update \d the (loss|gradient|step) "):
        curve(tmp_path, "graph", "run", "train.log_period=1", *words)
    made = read_column(tmp_path / "run") if when else {}
    assert len(made) == when
    curve(
        tmp_path, "graph", "control", "train.rehearse=0"
    )  # it trains incorrectly if nothing is compared


class TurnsWrong(Classifier):
    """Once enabled, changes a value in place before the backward pass reads it."""

    def __init__(self):
        super().__init__()
        self.is_wrong = False

    def forward(self, x, y):
        hidden = flow.sigmoid(self.a(x))
        if self.is_wrong:
            hidden += 1.0
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(hidden), y)}}


@pytest.mark.parametrize("every", [3, 100])
def test_a_wrong_gradient_during_a_run_is_refused(every):
    trainer = make_trainer("eager", batches(6), TurnsWrong, rehearse_every=every)

    def turn_wrong(trainer):
        trainer.model.is_wrong = trainer.completed_iters >= 2

    trainer.register_hooks([CallbackHook(after_step=turn_wrong)])
    if every == 100:  # negative control
        trainer.train(0, 6)
        return
    with pytest.raises(
        NotTheSame, match="changes a value in place that the backward pass reads: in update 3 "
    ):
        trainer.train(0, 6)
    assert trainer.completed_iters == 2


def test_another_precision_is_not_compared(monkeypatch):
    monkeypatch.setattr(trainer_module, "AMP_DEVICES", ("cpu",))
    trainer = make_trainer("graph", amp="fp16", rehearse_every=1)
    with refused("cannot compare updates: amp=fp16 rounds them differently"):
        trainer.train(0, 1)


def test_a_resumed_run_is_rehearsed_at_its_iteration(mode, tmp_path):
    train(tmp_path / "whole", mode, "train.rehearse=0")
    make_run(tmp_path / "run", mode).train(until=4)
    train(tmp_path / "run", mode, "train.rehearse=2", resume=True)
    assert read_column(tmp_path / "run") == read_column(tmp_path / "whole")
