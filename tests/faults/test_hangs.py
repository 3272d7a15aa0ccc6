"""A rank that hangs ends the job with one line that says where every rank is; a slow job is left alone."""

from __future__ import annotations

import jobs
import pytest

#: how long the start may take on a busy machine, where a test is about what comes later
START = {f"LIBAI_STALL_TIMEOUT_{phase}": "300" for phase in ("IMPORT", "BUILD", "LOAD", "COMPILE", "EVALUATE", "SAVE")}
pytestmark = [pytest.mark.launch, pytest.mark.e2e]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs.user_folder(tmp_path_factory)


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_collective_is_found(folder, mode):
    done = jobs.train_sh(
        "user_config.py",
        2,
        f"graph.enabled={str(mode == 'graph').lower()}",
        f"train.output_dir=hang_{mode}",
        "train.extra_hooks=[{_target_: user_models.SleepsOnRank, rank: 1}]",
        cwd=folder,
        LIBAI_STALL_TIMEOUT="8",
        **START,
        timeout=100,
    )
    assert done.returncode == 1, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("launch:")]
    assert line.startswith("launch: no rank made progress for 8 s: "), done
    assert "rank 0 after iteration 3 at File" in line or "rank 0 after iteration 4 at File" in line, line
    assert "rank 1 after iteration 3 at File" in line and "user_models.py" in line and "in after_step" in line, line
    assert "LIBAI_STALL_TIMEOUT=<seconds> waits longer" in line
    assert "rank 1, innermost call first:" in done.stderr


@pytest.mark.slow
def test_a_job_that_goes_on_is_left_alone(folder):
    """Negative control: 8 s of iterations of 0.4 s each. Iterations and not the job are what the limit is for."""
    done = jobs.train_sh(
        "user_config.py",
        1,
        "graph.enabled=false",
        "train.output_dir=slow",
        "train.extra_hooks=[{_target_: user_models.Slow, seconds: 0.4}]",
        cwd=folder,
        LIBAI_STALL_TIMEOUT="6",
        **START,
    )
    assert done.returncode == 0 and "no rank made progress" not in done.stderr, done


def hang(folder, name, *settings, **limits):
    """The `launch:` line of a job of two ranks that is ended because it hangs."""
    done = jobs.train_sh(
        "user_config.py", 2, f"train.output_dir={name}", *settings, cwd=folder, timeout=120, **{**START, **limits}
    )
    assert done.returncode == 1, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("launch:")]
    return line


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_data_is_found_before_the_first_iteration(folder):
    line = hang(
        folder,
        "hang_build",
        "dataloader.train.dataset._target_=user_models.samples_that_hang",
        "+dataloader.train.dataset.rank=1",
        LIBAI_STALL_TIMEOUT_BUILD="5",
    )
    assert "no rank made progress for 5 s while building data and model: " in line, line
    assert "rank 1, building data and model, at File" in line and "in samples_that_hang" in line, line
    assert "LIBAI_STALL_TIMEOUT_BUILD=<seconds> waits longer" in line, line
    kept = (folder / "hang_build" / "errors" / "rank_1.txt").read_text()
    assert "in samples_that_hang" in kept, "the stack is kept as well"


def test_a_rank_that_hangs_in_a_compilation_is_found(folder):
    settings = ("graph.enabled=true", "model._target_=user_models.HangsWhenTraced")
    line = hang(folder, "hang_compile", *settings, LIBAI_STALL_TIMEOUT_COMPILE="5")
    assert "while compiling: " in line and "rank 1, compiling, at File" in line and "user_models.py" in line, line


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_meet_the_others_is_named(folder):
    """Rank 0 sleeps in the user's program before oneflow is imported, so that rank 1 waits for it in vain."""
    (folder / "late.py").write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(1000)\nimport libai, oneflow\n"
    )
    done = jobs.train_sh("user_config.py", 2, file="late.py", cwd=folder, LIBAI_CONNECT_TIMEOUT="3")
    assert done.returncode == 2, done
    assert "error: rank 1: rank 1 could not reach rank 0" in done.stderr, done
    assert "launch: missing where the ranks meet: rank 0, importing, at File" in done.stderr, done
    assert 'late.py", line 3' in done.stderr, done
