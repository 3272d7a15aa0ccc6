"""The best checkpoints, the metric that chooses them, and what a training returns (FEATURES A3 rows 49 and 50)."""

from __future__ import annotations

import json

import contract_runs
import jobs
import numpy as np
import pytest
from contract_runs import weights

from libai import checkpoint
from libai.engine import hooks

#: a rate so high that the loss rises and falls, so that the best evaluation is not the last one
WILD = (
    "optim.lr=1.0",
    "~lr_scheduler",
    "train.evaluation.eval_period=1",
    "train.evaluation.eval_metric=-val/loss",
    "train.checkpointer.period=100",
)


def same(first, second):
    return all(np.array_equal(value, second[name]) for name, value in first.items())


def best_hook(run):
    return next(hook for hook in run.trainer.hooks if isinstance(hook, hooks.BestCheckpointHook))


@pytest.mark.parametrize(
    ("metric", "choose"), [("-val/loss", min), ("val/loss", min), ("+val/loss", max), ("+val/accuracy", max)]
)
def test_a_sign_says_which_way_the_metric_is_better(metric, choose, tmp_path):
    """fastNLP's `-loss`. What is best does not depend on the mode; the next test has both."""
    run = contract_runs.make_run(tmp_path, "eager", *WILD, f"train.evaluation.eval_metric={metric}")
    result = run.train()
    values = jobs.read_column(tmp_path, f"eval/{metric.lstrip('+-')}")
    best = choose(values, key=values.get)
    assert (result.metric, result.best, result.best_iter) == (metric.lstrip("+-"), values[best], best)
    assert result.best_metrics[result.metric] == result.best and len(result.best_metrics) > 1
    assert result.best_epoch == best / run.plan.iters_per_epoch and result.seconds > 0


def test_train_returns_its_result_and_the_summary_has_it(mode, tmp_path):
    result = contract_runs.make_run(tmp_path, mode, *WILD).train()
    values = jobs.read_column(tmp_path, "eval/val/loss")
    best = min(values, key=values.get)
    assert 0 < best < 8  # otherwise the best one is the last one, and nothing is tested
    assert (result.status, result.iterations, result.best, result.best_iter) == ("finished", 8, values[best], best)
    assert result.seconds > 0
    root = tmp_path / "checkpoints"
    assert (result.best_path, result.last_path) == (root / f"iter_{best:07d}", root / "iter_0000008")
    assert json.loads((tmp_path / "summary.json").read_text())["best"] == {
        "metric": "val/loss",
        "value": values[best],
        "iteration": best,
        "epoch": result.best_epoch,
        "metrics": result.best_metrics,
        "checkpoint": f"iter_{best:07d}",
    }


def test_a_result_without_a_metric_has_no_best(mode, tmp_path):
    result = contract_runs.make_run(tmp_path, mode).train()
    assert (result.status, result.metric, result.best, result.best_path) == ("finished", None, None, None)
    assert json.loads((tmp_path / "summary.json").read_text())["best"] is None


def test_the_best_value_is_known_without_checkpoints(tmp_path):
    result = contract_runs.make_run(tmp_path, "eager", *WILD, "train.checkpointer.enabled=false").train()
    assert result.best is not None and (result.best_path, result.last_path) == (None, None)


def test_the_model_has_the_best_weights_at_the_end(mode, tmp_path):
    run = contract_runs.make_run(tmp_path / "best", mode, *WILD, "train.load_best_at_end=true")
    result = run.train()
    plain = contract_runs.make_run(tmp_path / "last", mode, *WILD)
    plain.train()
    assert run.evaluate()["eval/val/loss"] == pytest.approx(result.best, rel=1e-6)
    assert not same(weights(run), weights(plain))
    last = checkpoint.load(result.last_path).tensors["model"]  # what a resume continues from is the last state
    assert all(np.array_equal(np.asarray(last[name]), value) for name, value in weights(plain).items())


def test_with_averaged_weights_the_best_average_is_taken(mode, tmp_path):
    average = ("train.ema.enabled=true", "train.ema.decay=0.5")
    run = contract_runs.make_run(tmp_path, mode, *WILD, *average, "train.load_best_at_end=true")
    result = run.train()
    assert result.best_iter < 8
    assert run.evaluate()["eval/val/loss"] == pytest.approx(result.best, rel=1e-6)


def test_a_stopped_run_continues_from_its_last_weights_not_the_best(mode, tmp_path):
    stop = ("train.evaluation.eval_mode=min", "train.evaluation.early_stop_patience=1")
    run = contract_runs.make_run(tmp_path / "a", mode, *WILD, *stop, "train.load_best_at_end=true")
    plain = contract_runs.make_run(tmp_path / "b", mode, *WILD, *stop)
    for each in (run, plain):
        assert each.train().status == "stopped"
    assert not same(weights(run), weights(plain))
    for each in (run, plain):
        each.train()
    assert jobs.read_column(tmp_path / "a") == jobs.read_column(tmp_path / "b")


def test_links_lead_to_the_last_and_the_best_checkpoint(mode, tmp_path):
    result = contract_runs.make_run(tmp_path, mode, *WILD).train()
    for name, path in (("last", result.last_path), ("best", result.best_path)):
        assert (tmp_path / name).is_symlink() and (tmp_path / name).resolve() == path.resolve()
        assert checkpoint.verify(tmp_path / name) == []

    again = contract_runs.make_run(tmp_path, mode, f"train.load_weight={tmp_path}/best", "train.train_iter=1")
    assert same(
        {name: np.asarray(t) for name, t in checkpoint.load(result.best_path).tensors["model"].items()},
        weights(again),
    )
    again.train()  # the earlier run is moved aside, with its links; this one has no metric
    assert (tmp_path / "last").resolve().name == "iter_0000001" and not (tmp_path / "best").is_symlink()
    (earlier,) = (tmp_path / "previous").iterdir()
    assert (earlier / "best").resolve() == (earlier / "checkpoints" / result.best_path.name).resolve()
    assert checkpoint.verify(earlier / "best") == []


def test_what_stands_where_a_link_would_be_is_left_alone(tmp_path):
    (tmp_path / "last").mkdir()
    contract_runs.train(tmp_path, "eager")
    assert (tmp_path / "last").is_dir() and not (tmp_path / "last").is_symlink()
