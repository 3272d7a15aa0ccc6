"""The best checkpoints, the metric that selects them, and the result of training (FEATURES A3 rows
49 and 50).
"""

import json
import re
import signal
from typing import ClassVar

import pytest
from contract_runs import make_config, make_run, weights
from jobs import read_column
from refusals import refused
from toy import are_equal

from libai import checkpoint
from libai.config import LazyCall, validate
from libai.config.settings.errors import ConfigError
from libai.engine import Run, StopTraining, default_setup
from libai.engine.hooks import CallbackHook
from libai.evaluation import Evaluator
from libai.launch.stop import StoppedFromOutside

pytestmark = pytest.mark.e2e

#: a learning rate so high that the loss rises and falls, so the best evaluation is not the last one
WILD = (
    "optim.lr=1.0",
    "~lr_scheduler",
    "train.evaluation.eval_period=1",
    "train.evaluation.eval_metric=-val/loss",
    "train.checkpointer.period=100",
)


def test_a_direction_against_the_evaluator_is_refused(tmp_path):
    """The worst checkpoint would be marked as the best."""
    with refused("would keep the checkpoint with the worst val/accuracy: .* says that max is bet"):
        make_run(tmp_path, "eager", "train.evaluation.eval_metric=-val/accuracy")


@pytest.fixture(scope="module")
def wild(mode, tmp_path_factory):
    """Return a finished run and its result."""
    run = make_run(tmp_path_factory.mktemp("wild"), mode, *WILD)
    return run, run.train()


def test_train_returns_its_result_and_the_summary_has_it(wild):
    run, result = wild
    values = read_column(run.output_dir, "eval/val/loss")
    best = min(values, key=values.get)
    assert 0 < best < 8  # if the best were the last, the test would be meaningless
    assert (result.status, result.iterations, result.best, result.best_iter) == (
        "finished",
        8,
        values[best],
        best,
    )
    assert result.seconds > 0 and result.best_metrics["val/loss"] == values[best]
    assert result.best_epoch == pytest.approx(read_column(run.output_dir, "train/epoch")[best])
    root = run.output_dir / "checkpoints"
    assert (result.best_path, result.last_path) == (
        root / f"iter_{best:07d}",
        root / "iter_0000008",
    )
    assert json.loads((run.output_dir / "summary.json").read_text())["best"] == {
        "metric": "val/loss",
        "mode": "min",
        "value": values[best],
        "iteration": best,
        "epoch": result.best_epoch,
        "metrics": result.best_metrics,
        "checkpoint": f"iter_{best:07d}",
    }


def test_the_model_has_the_best_weights_at_the_end(wild, mode, tmp_path):
    run = make_run(tmp_path, mode, *WILD, "train.load_best_at_end=true")
    result = run.train()
    plain, _ = wild
    assert run.evaluate()["eval/val/loss"] == pytest.approx(result.best, rel=1e-6)
    assert not are_equal(weights(run), weights(plain))
    last = checkpoint.load(result.last_path).tensors[
        "model"
    ]  # a resume continues from the last state
    assert are_equal(last, weights(plain))


def test_links_lead_to_the_last_and_the_best_checkpoint(wild):
    run, result = wild
    for name, path in (("last", result.last_path), ("best", result.best_path)):
        link = run.output_dir / name
        assert link.is_symlink() and link.resolve() == path.resolve()
        assert checkpoint.verify(link) == []


class Scored(Evaluator):
    """An evaluator whose score follows from the number of updates."""

    scores: ClassVar[dict[int, float]] = {}
    directions: ClassVar[dict[str, str]] = {"score": "max"}
    trainer = None

    def process(self, batch, outputs):
        return {"n": 1.0}

    def compute(self, sums):
        return {"score": self.scores.get(self.trainer.completed_iters, 0.0)}


def scored_run(folder, mode, scores, *overrides, resume=False, metric="val/score"):
    """Return a run with an evaluation after every second of 8 updates."""
    settings = [
        "train.evaluation.eval_period=2",
        f"train.evaluation.eval_metric={metric}",
        "train.checkpointer.max_to_keep=null",
        *overrides,
    ]
    config = make_config(folder, mode, *settings)
    config.train.evaluation.evaluators = {"scored": LazyCall(Scored)()}
    run = Run(default_setup(validate(config)), resume=resume)
    Scored.scores, Scored.trainer = scores, run.trainer
    return run


def recorded(folder):
    """Return the best checkpoint according to best.json, the link and the summary."""
    best = json.loads((folder / "checkpoints" / "best.json").read_text())["checkpoint"]
    summary = json.loads((folder / "summary.json").read_text())["best"]["checkpoint"]
    return best, (folder / "best").resolve().name, summary


def test_a_rewound_run_forgets_a_later_best_checkpoint(mode, tmp_path):
    scored_run(tmp_path, mode, {2: 0.9, 4: 0.5, 8: 0.95}).train()
    assert recorded(tmp_path) == ("iter_0000008",) * 3
    older = str(tmp_path / "checkpoints" / "iter_0000004")
    scored_run(tmp_path, mode, {6: 0.3, 8: 0.2}, resume=older).train()
    assert recorded(tmp_path) == ("iter_0000002",) * 3


@pytest.mark.parametrize("metric", ["-val/loss", "null"])
def test_a_best_value_is_compared_with_the_same_metric_only(mode, metric, tmp_path):
    """The scores are far below the losses, so none would beat a best loss."""
    scored_run(tmp_path, mode, {4: 0.9}, "train.train_iter=4", metric=metric).train()
    patience = "train.evaluation.early_stop_patience=2"
    result = scored_run(tmp_path, mode, {6: 0.2, 8: 0.3}, patience, resume=True).train()
    assert (result.status, result.best, result.best_iter) == ("finished", 0.3, 8)


def test_a_run_whose_patience_is_used_up_stays_stopped(mode, tmp_path):
    patience = "train.evaluation.early_stop_patience=2"
    first = scored_run(tmp_path, mode, {2: 0.5}, patience).train()
    assert (first.status, first.iterations) == ("stopped", 6)
    again = scored_run(tmp_path, mode, {8: 0.9}, patience, resume=True).train()
    assert (again.status, again.iterations, again.best_iter) == ("stopped", 6, 2)
    assert "early_stop_patience continues" in (tmp_path / "log.txt").read_text()
    longer = "train.evaluation.early_stop_patience=9"
    result = scored_run(tmp_path, mode, {8: 0.9}, longer, resume=True).train()
    assert (result.status, result.best_iter) == ("finished", 8)


@pytest.mark.parametrize("point", ["before_step", "before_update", "after_step"])
def test_the_last_evaluation_of_a_stopped_run_can_be_the_best(mode, point, tmp_path):
    """The run continues with the batch that a stop before an update has left."""
    scored_run(tmp_path / "whole", mode, {}).train()
    run = scored_run(tmp_path / "cut", mode, {2: 0.5, 3: 0.7})

    def stop(trainer):
        if trainer.completed_iters == 3:
            raise StopTraining("enough")

    run.trainer.register_hooks([CallbackHook(**{point: stop})])
    result = run.train()
    assert (result.status, result.iterations, result.best_iter) == ("stopped", 3, 3)
    assert recorded(tmp_path / "cut") == ("iter_0000003",) * 3
    scored_run(tmp_path / "cut", mode, {}, resume=True).train()
    assert read_column(tmp_path / "cut") == read_column(tmp_path / "whole")


def test_a_part_of_a_run_adds_no_evaluation(mode, tmp_path):
    run = scored_run(tmp_path, mode, {})
    run.train(until=3)
    run.train()
    assert list(read_column(tmp_path, "eval/val/score")) == [2, 4, 6, 8]


def test_a_missing_best_checkpoint_is_refused_before_training(mode, tmp_path):
    settings = ("train.load_best_at_end=true", "train.train_iter=4")
    result = scored_run(tmp_path, mode, {2: 0.9}, *settings).train()
    result.best_path.rename(tmp_path / "elsewhere")
    run = scored_run(tmp_path, mode, {}, settings[0], resume=True)
    with refused(r"load_best_at_end=true would load .*iter_0000002"):
        run.train()
    assert run.trainer.completed_iters == 4


def test_a_plateau_in_the_wrong_direction_is_refused(mode, tmp_path):
    schedule = "lr_scheduler._target_=oneflow.optim.lr_scheduler.ReduceLROnPlateau"
    with refused(r"Set lr_scheduler\.mode=max"):
        scored_run(tmp_path, mode, {}, "~lr_scheduler.alpha", schedule)
    right = scored_run(
        tmp_path, mode, {}, "~lr_scheduler.alpha", schedule, "+lr_scheduler.mode=max"
    )
    assert right.lr_scheduler.mode == right.better


def test_the_best_checkpoint_evaluates_to_its_logged_value_with_averages(mode, tmp_path):
    """Averages are evaluated in training, so `--eval-only` must evaluate them too."""
    ema = ("train.ema.enabled=true", "train.ema.decay=0.9")
    result = make_run(tmp_path / "run", mode, *WILD, *ema).train()
    weights_of = f"train.load_weight={result.best_path}"
    averaged = make_run(tmp_path / "other", mode, *WILD, *ema, weights_of)
    assert averaged.report_evaluation()["eval/val/loss"] == pytest.approx(result.best, rel=1e-6)
    plain = make_run(tmp_path / "other", mode, *WILD, weights_of)
    found = plain.report_evaluation()["eval/val/loss"]  # negative control: the last weights
    assert found != pytest.approx(result.best, rel=1e-3)


@pytest.mark.parametrize("loads", ["true", "false"])
def test_a_test_set_is_evaluated_once_with_the_final_weights(mode, loads, tmp_path):
    settings = ("train.evaluation.at_end=[other]", f"train.load_best_at_end={loads}")
    run = make_run(tmp_path, mode, *WILD, *settings)
    result = run.train()
    assert len(read_column(tmp_path, "eval/val/loss")) == 8
    expected = run.trainer.evaluate(run.test_loaders["other"], run.evaluators, "other")
    assert read_column(tmp_path, "eval/other/loss") == {8: expected["eval/other/loss"]}
    log = (tmp_path / "log.txt").read_text()
    assert "evaluate val every 1, other at the end" in log
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["metrics"]["eval/other/loss"] == expected["eval/other/loss"]
    line = f"best at {result.best_iter}: .*other/loss {expected['eval/other/loss']:.4f}.*\\(loaded"
    assert bool(re.search(line, log)) == (loads == "true")


@pytest.mark.parametrize("names, text", [("[val]", "must be evaluated"), ("[x]", "has the datas")])
def test_a_test_set_that_decides_or_is_unknown_is_refused(names, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        make_run(tmp_path, "eager", *WILD, f"train.evaluation.at_end={names}")


def test_a_small_improvement_is_kept_but_does_not_restart_the_patience(mode, tmp_path):
    settings = (
        "train.evaluation.early_stop_patience=2",
        "train.evaluation.early_stop_min_delta=0.1",
    )
    scores = {2: 0.5, 4: 0.55, 6: 0.58}
    result = scored_run(tmp_path, mode, scores, *settings).train()
    assert (result.status, result.iterations, result.best, result.best_iter) == (
        *("stopped", 6, 0.58, 6),
    )


class StopsIn(Evaluator):
    """Asks the run to stop while the test set is evaluated after training."""

    is_asking = True

    def process(self, batch, outputs):
        if self.is_asking:
            signal.raise_signal(signal.SIGTERM)
        return {"n": 1.0}

    def compute(self, sums):
        return {"batches": sums["n"]}


def test_a_stop_during_the_last_evaluation_can_be_resumed(mode, tmp_path, monkeypatch):
    config = make_config(tmp_path, mode, "train.evaluation.at_end=[other]")
    config.train.evaluation.evaluators = {"other/stops": LazyCall(StopsIn)()}
    config.train.num_sanity_eval_batches = 0
    checked = validate(config)
    run = Run(default_setup(checked))
    monkeypatch.setattr(run, "check_evaluation", lambda: None)
    with pytest.raises(StoppedFromOutside):
        run.train()
    monkeypatch.setattr(StopsIn, "is_asking", False)
    assert Run(default_setup(checked), resume=True).train().status == "finished"
    assert read_column(tmp_path, "eval/other/batches") == {8: 2.0}
