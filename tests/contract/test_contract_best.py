"""The best checkpoints, the metric that selects them, and the result of training (FEATURES A3 rows
49 and 50).
"""

import json

import contract_runs
import jobs
import numpy as np
import pytest
from contract_runs import weights

from libai import checkpoint

pytestmark = pytest.mark.e2e

#: a learning rate so high that the loss rises and falls, so the best evaluation is not the last one
WILD = (
    "optim.lr=1.0",
    "~lr_scheduler",
    "train.evaluation.eval_period=1",
    "train.evaluation.eval_metric=-val/loss",
    "train.checkpointer.period=100",
)


def same(first, second):
    return all(np.array_equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("metric", "choose"),
    [("-val/loss", min), ("val/loss", min), ("+val/loss", max), ("+val/accuracy", max)],
)
def test_a_sign_gives_the_better_direction_of_the_metric(metric, choose, tmp_path):
    """fastNLP writes `-loss`. One mode is enough here: the direction does not depend on it."""
    result = contract_runs.make_run(
        tmp_path, "eager", *WILD, f"train.evaluation.eval_metric={metric}"
    ).train()
    values = jobs.read_column(tmp_path, f"eval/{metric.lstrip('+-')}")
    best = choose(values, key=values.get)
    assert (result.metric, result.best, result.best_iter) == (
        metric.lstrip("+-"),
        values[best],
        best,
    )


@pytest.fixture(scope="module", params=["eager", "graph"])
def mode(request):
    """Both execution modes, one after the other, because tests of a mode share a run."""
    return request.param


@pytest.fixture(scope="module")
def wild(mode, tmp_path_factory):
    """Return a finished run and its result."""
    run = contract_runs.make_run(tmp_path_factory.mktemp("wild"), mode, *WILD)
    return run, run.train()


def test_train_returns_its_result_and_the_summary_has_it(wild):
    run, result = wild
    values = jobs.read_column(run.output_dir, "eval/val/loss")
    best = min(values, key=values.get)
    assert 0 < best < 8  # if the best were the last, the test would be meaningless
    assert (result.status, result.iterations, result.best, result.best_iter) == (
        "finished",
        8,
        values[best],
        best,
    )
    assert result.seconds > 0 and result.best_metrics["val/loss"] == values[best]
    assert result.best_epoch == pytest.approx(jobs.read_column(run.output_dir, "train/epoch")[best])
    root = run.output_dir / "checkpoints"
    assert (result.best_path, result.last_path) == (
        root / f"iter_{best:07d}",
        root / "iter_0000008",
    )
    assert json.loads((run.output_dir / "summary.json").read_text())["best"] == {
        "metric": "val/loss",
        "value": values[best],
        "iteration": best,
        "epoch": result.best_epoch,
        "metrics": result.best_metrics,
        "checkpoint": f"iter_{best:07d}",
    }


def test_the_model_has_the_best_weights_at_the_end(wild, mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode, *WILD, "train.load_best_at_end=true")
    result = run.train()
    plain, _ = wild
    assert run.evaluate()["eval/val/loss"] == pytest.approx(result.best, rel=1e-6)
    assert not same(weights(run), weights(plain))
    last = checkpoint.load(result.last_path).tensors[
        "model"
    ]  # a resume continues from the last state
    assert all(
        np.array_equal(np.asarray(last[name]), value) for name, value in weights(plain).items()
    )


def test_links_lead_to_the_last_and_the_best_checkpoint(wild):
    run, result = wild
    for name, path in (("last", result.last_path), ("best", result.best_path)):
        link = run.output_dir / name
        assert link.is_symlink() and link.resolve() == path.resolve()
        assert checkpoint.verify(link) == []
