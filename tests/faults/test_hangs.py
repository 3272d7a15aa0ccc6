"""A hanging rank ends the job, and the report shows where every rank is.

A slow job is not ended.
"""

import signal

import jobs
import pytest

from libai.launch.supervisor import Rank
from libai.utils.rank_notes import RankState

#: a hang in native code that holds the interpreter's lock
DEADLOCK = (
    "import ctypes; c = ctypes.PyDLL(None); m = ctypes.create_string_buffer(64); "
    "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"
)
pytestmark = [pytest.mark.launch, pytest.mark.e2e]


def hang(folder, name, processes, *settings, **limits):
    """Return the `launch:` lines of a job that is ended because it hangs."""
    output = f"train.output_dir={name}"
    done = jobs.train_sh(
        "user_config.py", processes, output, *settings, cwd=folder, timeout=140, **limits
    )
    assert done.returncode == 1, done
    return [line for line in done.stderr.splitlines() if line.startswith("launch:")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "import time; time.sleep(1000)",
        DEADLOCK,
        "os.kill(os.getppid(), 19), os.kill(os.getpid(), 19)",
    ],
    ids=["python", "native", "stopped with its parent"],
)
def test_a_rank_that_never_comes_to_the_collective_is_found(folder, mode, statement):
    enabled = f"graph.enabled={str(mode == 'graph').lower()}"
    other, line = hang(
        folder, f"hang_{mode}", 2, enabled, jobs.does(statement), LIBAI_STEP_TIMEOUT="8"
    )
    assert line.startswith(
        "launch: rank 1 failed first: no progress for 8 s after iteration 3, "
    ), line
    assert other.startswith("launch: rank 0 was after iteration "), other
    stopped = statement.endswith("19)")
    assert ("and did not answer" if stopped else 'at File "') in line
    assert line.endswith(
        "LIBAI_STEP_TIMEOUT=<seconds> waits longer, 0 waits without a limit; the other ranks were "
        "ended."
    )
    kept = folder / f"hang_{mode}" / "errors" / "rank_1.txt"
    assert kept.is_file() and (stopped or "in after_step" in kept.read_text())


@pytest.mark.slow
def test_a_job_that_goes_on_is_left_alone(folder):
    """Negative control: a job of 12 s with iterations of 0.6 s.

    The limit applies to an iteration, not to the job.
    """
    settings = (
        "train.output_dir=slow",
        "train.extra_hooks=[{_target_: user_models.Slow, seconds: 0.6}]",
    )
    done = jobs.train_sh("user_config.py", 1, *settings, cwd=folder, LIBAI_STEP_TIMEOUT="10")
    assert done.returncode == 0 and "no progress" not in done.stderr, done


def test_a_rank_that_hangs_before_the_first_iteration_is_found(folder):
    data = (
        "dataloader.train.dataset._target_=user_models.samples_that_hang",
        "+dataloader.train.dataset.rank=1",
    )
    *_, line = hang(folder, "hang_build", 2, *data, LIBAI_START_TIMEOUT="20")
    assert (
        "rank 1 failed first: no progress for 20 s before the first iteration, in the phase "
        "'build', at File" in line
    )
    assert "in samples_that_hang" in line and "LIBAI_START_TIMEOUT=<seconds> waits longer" in line


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_compilation_is_found(folder):
    settings = ("graph.enabled=true", "model._target_=user_models.HangsWhenTraced")
    *_, line = hang(folder, "hang_compile", 2, *settings, LIBAI_START_TIMEOUT="20")
    assert "in the phase 'compile', at File" in line and "user_models.py" in line, line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "line"), [(0, "rank 0 was "), (1, "rank 1 failed first: no progress for 3 s ")]
)
def test_a_rank_that_does_not_come_to_meet_the_others_is_named(folder, late, line):
    """The rank sleeps in the user's program before it imports oneflow, so the other rank waits in
    vain.
    """
    program = (
        "import os, time\nif os.environ['RANK'] == '{}':\n    time.sleep(1000)\nimport libai, "
        "oneflow\n"
    )
    (folder / "late.py").write_text(program.format(late))
    done = jobs.train_sh("user_config.py", 2, file="late.py", cwd=folder, LIBAI_START_TIMEOUT="3")
    assert done.returncode == (2 if late == 0 else 1), done
    assert ("rank 1 could not reach rank 0" in done.stderr) == (late == 0), done
    assert f"launch: {line}before the first iteration, at File" in done.stderr, done
    assert 'late.py", line 3' in done.stderr, done


@pytest.mark.parametrize(("limit", "is_ended"), [(1.0, True), (0.0, False)])
def test_only_a_program_with_a_limit_is_ended(monkeypatch, tmp_path, limit, is_ended):
    """Outside libai's phases, a user's program may take any time."""
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, signum: killed.append(signum))
    monkeypatch.setattr("libai.launch.rank.STACK_SECONDS", 0.0)
    rank = Rank(0, str(tmp_path), RankState(pid=1234, limit=limit))
    for _ in range(3):
        rank.state.beats += 1  # progress
        rank.end_if_hung(0.6)
        rank.end_if_hung(0.6)
    assert not killed and rank.code is None
    rank.end_if_hung(0.6)
    assert (
        (signal.SIGKILL in killed) == bool(rank.state.hung_seconds) == rank.has_failed == is_ended
    )
