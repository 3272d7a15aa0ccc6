"""The output folder contains one run at a time.

An earlier run is moved aside, and no other job writes into it.
"""

import logging
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
from contract_runs import make_config, make_run, train, tree
from jobs import read_column
from refusals import refused
from toy import Classifier

from libai import __version__, checkpoint
from libai.config import LazyCall, LazyConfig, validate
from libai.engine import Run, default_setup
from libai.engine.hook_base import HookBase
from libai.engine.hooks import CallbackHook
from libai.engine.run import report
from libai.engine.run.report import start_banner
from libai.engine.run.run_folder import find_run
from libai.launch.guard import run_guarded
from libai.utils.errors import OutputLostError, UserError
from libai.utils.folder_lock import FolderLock, find_holder

pytestmark = pytest.mark.e2e


def names(folder):
    return [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]


def run_until(folder, mode, until, *overrides):
    """Return a run of 8 iterations that was stopped after iteration `until`, with a checkpoint."""
    run = make_run(folder, mode, *overrides)
    run.train(until)
    return run


# ---------------------------------------------------------------------- one run per folder


def test_a_new_run_in_a_used_folder_is_not_mixed_with_the_old_one(mode, tmp_path):
    alone = tmp_path / "alone"
    train(alone, mode, "train.seed=5")
    folder = tmp_path / "used"
    first = make_run(folder, mode)
    first.train()
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "mine.txt").write_text("mine")
    before = tree(folder)
    second = run_until(folder, mode, 6, "train.seed=5", "train.checkpointer.max_to_keep=1")
    # retention counts only the checkpoints of this run: those of the earlier run have higher
    # numbers
    assert names(folder) == ["iter_0000006"]
    resumed = make_run(folder, mode, "train.seed=5", resume=True)
    assert (resumed.start_iter, resumed.folder.run_id) == (6, second.folder.run_id)
    resumed.train()
    assert read_column(folder) == read_column(alone)

    aside = folder / "previous" / first.folder.run_id
    log = (folder / "log.txt").read_text()
    assert f"moved the earlier run in this folder to {aside.relative_to(folder)}" in log
    assert f"iter_0000006 after iteration 6 of run {second.folder.run_id}" in log
    mine = {"notes.txt", "checkpoints/mine.txt"}
    assert tree(aside) == {name: found for name, found in before.items() if name not in mine}
    assert {name: tree(folder)[name] for name in mine} == {name: before[name] for name in mine}


def test_a_checkpoint_of_another_run_is_neither_resumed_nor_pruned(tmp_path, caplog):
    train(tmp_path / "other", "eager")
    run_until(tmp_path / "own", "eager", 5, "train.seed=5")
    shutil.copytree(
        tmp_path / "other/checkpoints/iter_0000008", tmp_path / "own/checkpoints/iter_0000008"
    )
    resumed = make_run(
        tmp_path / "own", "eager", "train.seed=5", "train.checkpointer.max_to_keep=1", resume=True
    )
    assert resumed.start_iter == 5
    assert any("ignored iter_0000008: not part of run" in message for message in caplog.messages)
    resumed.train(until=6)
    assert names(tmp_path / "own") == ["iter_0000006", "iter_0000008"]


def test_a_failed_check_leaves_the_earlier_run_where_it_is(tmp_path):
    train(tmp_path, "eager")
    before = tree(tmp_path)
    for mistake in (
        "model._target_=toy.Nope",
        "dataloader.train.dataset.count=0",
        "train.load_weight=/nowhere",
    ):
        with pytest.raises(UserError):
            make_run(tmp_path, "eager", mistake).train()
        assert tree(tmp_path) == before, mistake
    make_run(tmp_path, "eager").train()  # negative control
    assert tree(tmp_path) != before


class WrongShape(Classifier):
    """Fails only in its first update, because nothing calls forward before it."""

    def forward(self, x, y):
        return super().forward(x[:, :3], y)


@pytest.mark.parametrize("word", ["train.rehearse=null", "train.rehearse=0"])
def test_a_run_that_fails_before_its_first_update_leaves_the_folder_as_it_was(mode, word, tmp_path):
    train(tmp_path, mode)
    before = tree(tmp_path)
    with pytest.raises(Exception, match="(?i)matmul|shape|dim"):
        make_run(tmp_path, mode, word, "model._target_=test_contract_folder.WrongShape").train()
    assert tree(tmp_path) == before
    make_run(tmp_path, mode).train()  # negative control
    assert tree(tmp_path) != before


def test_a_folder_of_user_files_is_not_a_run(tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "log.txt"):
        (tmp_path / name).write_text("mine\n")
    (tmp_path / "checkpoints").mkdir()
    assert find_run(tmp_path) is None
    make_run(tmp_path, "eager").train(1)
    assert (
        not (tmp_path / "previous").exists()
        and (tmp_path / "metrics.1.jsonl").read_text() == "mine\n"
    )


def test_a_file_in_the_place_of_the_checkpoints_is_found_before_training(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with refused(r"cannot be written \(Not a directory: checkpoints\)"):
        make_run(tmp_path, "eager")


# ---------------------------------------------------------------------- one job per folder


def test_a_second_job_is_refused_and_changes_nothing(tmp_path):
    run_until(tmp_path, "eager", 4)
    ready = make_run(tmp_path, "eager")
    lock = FolderLock(tmp_path)
    before = tree(tmp_path)
    expected = f"in use: process {os.getpid()} on {os.uname().nodename} is training there"
    with refused(expected):
        make_run(tmp_path, "eager", resume=True)
    with refused(expected):
        ready.train()  # this run was built before the other job began
    run = default_setup(validate(make_config(tmp_path, "eager")), trains=False)
    Run(run, resume=True).report_evaluation()  # evaluation is allowed, because it writes nothing
    assert tree(tmp_path) == before
    lock.release()
    ready.train()
    assert find_holder(tmp_path) is None and not (tmp_path / "run.lock").exists()


def test_a_run_that_another_job_has_continued_meanwhile_is_not_resumed_from_before(tmp_path):
    run_until(tmp_path, "eager", 4)
    early, late = (make_run(tmp_path, "eager", resume=True) for _ in range(2))
    early.train(6)
    with refused("was continued by another job while this one was starting"):
        late.train()
    assert names(tmp_path) == ["iter_0000004", "iter_0000006"]


# ---------------------------------------------------------------- checks before anything is written


class CountedSchedule:
    """A user-defined schedule with only `step()`."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1


class SetHook(HookBase):
    def before_train(self):
        self.seen = set()

    def state_dict(self):
        return {"seen": self.seen}


def test_a_schedule_that_cannot_be_saved_is_refused_before_anything_happens(mode, tmp_path):
    config = make_config(tmp_path, mode)
    config.lr_scheduler = LazyCall(CountedSchedule)()
    with refused(r"CountedSchedule has no state_dict\(\) or load_state_dict\(state\)"):
        Run(default_setup(validate(config))).train()
    assert tree(tmp_path) == {}


def test_a_hook_whose_state_cannot_be_saved_is_refused_before_the_first_iteration(mode, tmp_path):
    run = make_run(tmp_path, mode)
    run.trainer.register_hooks([SetHook()])
    with refused(r"hooks.SetHook.seen is a set, which JSON cannot represent"):
        run.train()
    assert run.trainer.completed_iters == 0


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("period", [1, 1000])  # found when metrics are written, or only at the save
def test_a_folder_that_is_removed_during_a_run_ends_the_run(tmp_path, period, capsys):
    folder = tmp_path / "out"
    run = make_run(folder, "eager", f"train.log_period={period}", "train.evaluation.enabled=false")

    def lose_it(trainer):
        if trainer.iter == 1:
            shutil.rmtree(folder)

    run.trainer.register_hooks([CallbackHook(before_step=lose_it)])
    assert run_guarded(run.train) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "was removed or renamed during" in errors[0], errors
    assert isinstance(run.trainer.loop.failure, OutputLostError) and not folder.exists()
    assert run.trainer.completed_iters == (2 if period == 1 else 4)


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(28, "No space left on device"), OSError(5, "I/O error")]
)
def test_a_save_that_the_system_refuses_is_not_a_user_error(tmp_path, monkeypatch, capsys, error):
    from libai.checkpoint import saving

    def fail(*arguments):
        raise error

    run = make_run(tmp_path, "eager", "train.checkpointer.async_save=true")
    monkeypatch.setattr(saving, "_fill", fail)
    assert run_guarded(run.train) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "raise the limit of `ulimit -f`" in line and (
        "memory" in line or error.args[-1] in line
    ), line


# ---------------------------------------------------------------------- named after the time


def test_a_folder_is_named_after_the_time_of_the_job(tmp_path, mode, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LIBAI_START_TIME", "1e9")
    run = make_run(
        tmp_path,
        mode,
        f"train.output_dir={tmp_path}/${{now:%Y-%m-%d_%H-%M-%S}}",
        "train.train_iter=1",
    )
    run.train()
    assert run.output_dir == tmp_path / "2001-09-09_01-46-40"
    # independent of the time at which the folder is read
    assert LazyConfig.load(run.output_dir / "config.yaml").train.output_dir == str(run.output_dir)


# ---------------------------------------------------------------------- the banner


def banner_of(run):
    """Return the lines of the banner of `run`: title -> text."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("libai.engine")
    logger.addHandler(handler)
    try:
        start_banner(run)
    finally:
        logger.removeHandler(handler)
    assert len(lines) == 6 and all(len(line) <= 72 for line in lines[1:]), lines
    return {line[:11].strip(): line[11:].strip() for line in lines}


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            ["train.evaluation.eval_period=9", "train.checkpointer.period=100"],
            "evaluate val, other every 9, save every 100",
        ),
        (
            ["train.evaluation.enabled=false", "train.checkpointer.enabled=false"],
            "no evaluation, no checkpoints",
        ),
        (["lr_scheduler.warmup_iter=3"], "evaluate val, other every 4, save every 4"),
    ],
)
def test_the_banner_says_what_will_happen(tmp_path, overrides, expected):
    banner = banner_of(make_run(tmp_path, "eager", *overrides))
    assert banner["data"].endswith(f"; {expected}")
    assert banner["schedule"].endswith(", 3 of warm-up") == ("warmup" in overrides[0])
    assert "new run in eager mode" in banner[f"libai {__version__}"]


def test_kernels_that_could_not_be_built_cause_a_warning(tmp_path, monkeypatch, caplog):
    run = make_run(tmp_path, "eager")
    monkeypatch.setattr(
        report, "kernels_in_use", lambda: "oneflow's own, which are slower (no compiler)"
    )
    start_banner(run)
    assert "operations on CPU take oneflow's own, which are slower (no compiler)" in caplog.messages


def test_a_resumed_run_says_what_is_left(tmp_path, caplog):
    run_until(tmp_path, "eager", 5)
    resumed = make_run(tmp_path, "eager", "train.checkpointer.period=5", resume=True)
    banner = banner_of(resumed)
    assert "continued from iter_0000005" in banner[f"libai {__version__}"]
    assert banner["data"].endswith("evaluate val, other every 4, save every 5")
    resumed.train(6)
    resumed.train()
    assert any(
        message.startswith("done after 2 iterations (8 of 8)") for message in caplog.messages
    )
    caplog.clear()
    resumed.train()
    assert caplog.messages == [
        "nothing left to do: all 8 iterations are done. To continue, set a larger train.train_iter"
    ]


def test_a_killed_job_leaves_no_lock_and_its_children_hold_none(tmp_path, monkeypatch):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        lock = FolderLock(tmp_path)  # noqa: F841 (held until the kill)
        grandchild = os.fork()
        if grandchild == 0:
            os.write(write, str(os.getpid()).encode())
            signal.pause()
        os.waitpid(grandchild, 0)
        os._exit(0)
    grandchild = int(os.read(read, 20))
    assert find_holder(tmp_path)["pid"] == child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # the folder may also have become read-only
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=PermissionError))
    try:
        FolderLock(tmp_path).release()
    finally:
        os.kill(grandchild, signal.SIGKILL)
