"""Training by epochs and on a few batches (FEATURES A3 rows 48, 58 and 61).

44 samples in iterations of 8 are 5.5 iterations: epochs end in iterations 6 and 11.
"""

import pytest
from contract_runs import make_run, train
from jobs import read_column
from refusals import refused
from toy import batches, make_trainer

from libai import checkpoint
from libai.engine import HookBase
from libai.engine.hooks import CallbackHook
from libai.engine.run.batch_plan import BatchPlan

pytestmark = pytest.mark.e2e

PERIODS = ("train.evaluation.eval_period", "train.checkpointer.period", "train.log_period")


def test_a_period_of_an_epoch_is_the_iteration_in_which_it_ends(mode, tmp_path):
    by_epoch = [f"{name}=epoch" for name in PERIODS]
    run = make_run(
        tmp_path, mode, *by_epoch, "train.train_iter=12", "train.checkpointer.max_to_keep=null"
    )
    run.train()
    assert "evaluate val, other every epoch, save every epoch" in (tmp_path / "log.txt").read_text()
    assert list(read_column(tmp_path, "eval/val/loss")) == [6, 11, 12]
    assert list(read_column(tmp_path)) == [6, 11, 12]
    saved = [
        checkpoint.iteration_of(path.name)
        for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")
    ]
    assert saved == [6, 11, 12]


def test_an_epoch_of_unknown_length_is_refused():
    plan = BatchPlan(8, 1, 1, 8, 12, 0, samples_per_epoch=None)
    with refused(
        "train.log_period=epoch requires the number of samples .* samples_per_epoch",
    ):
        plan.period("epoch", "train.log_period")


def test_the_epoch_is_in_metrics_and_console_lines(mode, tmp_path):
    run = make_run(tmp_path, mode, "train.train_iter=11", "train.log_period=11")
    run.train()
    assert read_column(tmp_path, "train/epoch") == {11: 2.0}
    assert "iter 11/11  loss" in (tmp_path / "log.txt").read_text()


class Epochs(HookBase):
    """Records where epochs begin and end; its state is the number of ended epochs."""

    def __init__(self, calls):
        self.calls, self.ended, self.is_step_done = calls, 0, False

    def on_epoch_begin(self):
        self.calls.append(("begin", self.trainer.epoch, self.trainer.iter))

    def after_step(self):
        self.is_step_done = True

    def on_epoch_end(self):
        assert self.is_step_done  # the last iteration of an epoch belongs to it
        self.ended += 1
        self.calls.append(("end", self.trainer.epoch, self.trainer.iter))

    def state_dict(self):
        return {"ended": self.ended}

    def load_state_dict(self, state):
        self.ended = state["ended"]


EVENTS = [("begin", 0, 0), ("end", 0, 5), ("begin", 1, 6), ("end", 1, 10), ("begin", 2, 11)]


@pytest.mark.parametrize("first", [6, 8, 12], ids=["at an end", "in an epoch", "whole"])
def test_each_epoch_begins_and_ends_once_for_hooks(mode, first, tmp_path):
    """The first session ends after iteration `first`."""
    calls = []
    for resume, until in ((None, first), (True, 12)) if first < 12 else ((None, 12),):
        run = make_run(tmp_path, mode, "train.train_iter=12", resume=resume)
        hook = Epochs(calls)
        run.trainer.register_hooks([hook])
        if resume:
            run.resume(run.output_dir / "checkpoints" / f"iter_{first:07d}")
        run.train(until=until)
    assert calls == EVENTS and hook.ended == 2


def test_epochs_exist_for_hooks_without_a_config(mode):
    """An epoch of 3 micro-batches, with 2 of them in an iteration."""
    calls = []
    trainer = make_trainer(mode, batches(3), num_accumulation_steps=2)
    trainer.register_hooks([Epochs(calls)])
    trainer.train(0, 4)
    expected = [("begin", 0, 0), ("end", 0, 1), ("begin", 1, 2), ("end", 1, 2), ("begin", 2, 3)]
    assert calls == expected and trainer.epoch == 2


def test_epochs_of_unknown_length_are_refused_for_hooks(mode):
    trainer = make_trainer(mode, iter(batches(3)))
    trainer.register_hooks([CallbackHook(on_epoch_end=print)])
    expected = (
        r"CallbackHook.on_epoch_end needs the length of an epoch, and the training loader "
        r"\(list_iterator\) has no __len__. Use after_step"
    )
    with refused(expected):
        trainer.train(0, 1)
    assert trainer.completed_iters == 0


def test_overfitting_trains_on_the_same_batches_and_resumes_exactly(mode, tmp_path):
    """With a learning rate of almost 0 the losses depend only on the batches, so they repeat after
    two.
    """
    settings = ("train.overfit_batches=2", "optim.lr=1e-12", "~lr_scheduler")
    train(tmp_path / "whole", mode, *settings)
    losses = list(read_column(tmp_path / "whole").values())
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert losses == pytest.approx(losses[:2] * 4, rel=1e-6)
    half = make_run(tmp_path / "half", mode, *settings)
    half.train(until=3)
    train(tmp_path / "half", mode, *settings, resume=True)
    assert list(read_column(tmp_path / "half").values()) == losses
