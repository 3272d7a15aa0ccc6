"""Training by epochs and on a few batches (FEATURES A3 rows 48, 58 and 61).

44 samples in iterations of 8 are 5.5 iterations: epochs end in iterations 6 and 11.
"""

import contract_runs
import jobs
import pytest

from libai import checkpoint
from libai.engine.run.batch_plan import BatchPlan
from libai.utils.errors import UserError

pytestmark = pytest.mark.e2e

PERIODS = ("train.evaluation.eval_period", "train.checkpointer.period", "train.log_period")


def test_a_period_of_an_epoch_is_the_iteration_in_which_it_ends(mode, tmp_path):
    by_epoch = [f"{name}=epoch" for name in PERIODS]
    run = contract_runs.make_run(
        tmp_path, mode, *by_epoch, "train.train_iter=12", "train.checkpointer.max_to_keep=null"
    )
    run.train()
    assert "evaluate val, other every epoch, save every epoch" in (tmp_path / "log.txt").read_text()
    assert list(jobs.read_column(tmp_path, "eval/val/loss")) == [6, 11, 12]
    assert list(jobs.read_column(tmp_path)) == [6, 11, 12]
    saved = [
        checkpoint.iteration_of(path.name)
        for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")
    ]
    assert saved == [6, 11, 12]


def test_an_epoch_of_unknown_length_is_refused():
    plan = BatchPlan(8, 1, 1, 8, 12, 0, samples_per_epoch=None)
    with pytest.raises(
        UserError,
        match="train.log_period=epoch requires the number of samples .* samples_per_epoch",
    ):
        plan.period("epoch", "train.log_period")


def test_the_epoch_is_in_metrics_and_console_lines(mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode, "train.train_iter=11", "train.log_period=11")
    run.train()
    assert jobs.read_column(tmp_path, "train/epoch") == {11: 2.0}
    assert "iter 11/11  loss" in (tmp_path / "log.txt").read_text()


def test_overfitting_trains_on_the_same_batches_and_resumes_exactly(mode, tmp_path):
    """With a learning rate of almost 0 the losses depend only on the batches, so they repeat after
    two.
    """
    settings = ("train.overfit_batches=2", "optim.lr=1e-12", "~lr_scheduler")
    contract_runs.train(tmp_path / "whole", mode, *settings)
    losses = list(jobs.read_column(tmp_path / "whole").values())
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert losses == pytest.approx(losses[:2] * 4, rel=1e-6)
    half = contract_runs.make_run(tmp_path / "half", mode, *settings)
    half.train(until=3)
    contract_runs.train(tmp_path / "half", mode, *settings, resume=True)
    assert list(jobs.read_column(tmp_path / "half").values()) == losses
