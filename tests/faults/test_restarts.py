"""`--max-restarts`: a failed job continues from its last checkpoint, unless it would fail again or
was stopped.
"""

import shutil
from pathlib import Path

import jobs
import pytest

USER_FILES = Path(__file__).parents[1] / "launch"
CONFIG = "user_config.py"
pytestmark = [pytest.mark.launch, pytest.mark.e2e]


@pytest.fixture
def folder(tmp_path):
    for name in ("user_models.py", "user_config.py"):
        shutil.copy(USER_FILES / name, tmp_path)
    return tmp_path


def launch_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("launch:")]


def test_two_ranks_go_on_from_the_last_checkpoint_on_the_same_curve(folder):
    settings = ("graph.enabled=false", "train.checkpointer.period=4")
    whole = jobs.train_sh(CONFIG, 2, *settings, "train.output_dir=whole", cwd=folder)
    assert whole.returncode == 0, whole
    hook = f"train.extra_hooks=[{{_target_: user_models.FailsOnce, file: {folder / 'failed'}}}]"
    done = jobs.train_sh(
        CONFIG,
        2,
        *settings,
        hook,
        "train.output_dir=again",
        "--max-restarts",
        "2",
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done
    (again,) = launch_lines(done)
    assert "failed in iteration " in done.stderr and "\nRuntimeError: planted once\n" in done.stderr
    assert again == "launch: starting again from iter_0000004; 1 restarts left."
    assert jobs.read_curve(folder / "again") == jobs.read_curve(folder / "whole")


@pytest.mark.slow
def test_without_a_checkpoint_of_its_own_a_job_begins_again(folder):
    """A checkpoint of an earlier run in the folder is not used for this run."""
    first = jobs.train_sh(CONFIG, 1, "train.output_dir=o", "train.train_iter=2", cwd=folder)
    assert first.returncode == 0 and (folder / "o" / "checkpoints" / "iter_0000002").is_dir(), first
    hook = f"train.extra_hooks=[{{_target_: user_models.FailsOnce, file: {folder / 'failed'}}}]"
    done = jobs.train_sh(
        CONFIG,
        1,
        "train.output_dir=o",
        hook,
        "train.checkpointer.enabled=false",
        cwd=folder,
        MAX_RESTARTS="1",
    )
    assert done.returncode == 0, done
    assert launch_lines(done) == [
        "launch: starting again as before, with the same arguments; 0 restarts left."
    ]
    assert "resumed" not in done.stdout
    moved = list((folder / "o" / "previous").iterdir())  # the earlier run and the failed start
    assert (
        len(moved) == 2
        and [(path / "checkpoints" / "iter_0000002").is_dir() for path in moved].count(True) == 1
    )
    assert done.stdout.count(", new run in") == 2
    assert [row["iter"] for row in jobs.read_metrics(folder / "o")] == list(range(1, 21))


@pytest.mark.slow
def test_the_same_non_finite_iteration_is_not_tried_a_third_time(folder):
    done = jobs.train_sh(
        CONFIG, 1, "model._target_=user_models.NotFinite", "--max-restarts=9", cwd=folder
    )
    assert done.returncode == 1, done
    assert [line for line in launch_lines(done) if "starting again" in line] == [
        "launch: starting again as before, with the same arguments; 8 restarts left."
    ]
    assert (
        launch_lines(done)[-1]
        == "launch: NonFiniteLoss in iteration 1 happened again: not restarting."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "code"), [(["train.max_seconds=0.01"], 75), (["model._target_=nowhere.A"], 2)]
)
def test_a_stop_and_a_mistake_are_not_tried_again(folder, settings, code):
    done = jobs.train_sh(
        CONFIG, 1, *settings, "train.train_iter=100000", "--max-restarts", "3", cwd=folder
    )
    assert done.returncode == code and launch_lines(done) == [], done
