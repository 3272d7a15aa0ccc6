"""A rank that hangs ends the job with one line that says where every rank is; a slow job is left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jobs
import pytest

USER_FILES = Path(__file__).parents[1] / "launch"
pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    for name in ("user_models.py", "user_config.py"):
        shutil.copy(USER_FILES / name, folder)
    return folder


def test_a_rank_that_never_comes_to_the_collective_is_found(folder, mode):
    done = jobs.train_sh(
        "user_config.py",
        2,
        f"graph.enabled={str(mode == 'graph').lower()}",
        f"train.output_dir=hang_{mode}",
        "train.extra_hooks=[{_target_: user_models.SleepsOnRank, rank: 1}]",
        cwd=folder,
        LIBAI_STALL_TIMEOUT="8",
        timeout=100,
    )
    assert done.returncode == 1, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("launch:")]
    assert line.startswith("launch: no rank made progress for 8 s: "), done
    assert "rank 0 after iteration 3 at File" in line or "rank 0 after iteration 4 at File" in line, line
    assert "rank 1 after iteration 3 at File" in line and "user_models.py" in line and "in after_step" in line, line
    assert "LIBAI_STALL_TIMEOUT=<seconds> waits longer" in line
    assert "rank 1, innermost call first:" in done.stderr


def test_a_stopped_rank_is_named(folder):
    command = ["bash", jobs.TRAIN_SH, jobs.TRAIN_NET, "user_config.py", "2", "graph.enabled=false"]
    settings = [
        "train.output_dir=stopped",
        "train.train_iter=100000",
        "train.extra_hooks=[{_target_: user_models.Slow}]",
    ]
    process = subprocess.Popen(
        [*command, *settings],
        cwd=folder,
        env=jobs.clean_environment(LIBAI_STALL_TIMEOUT="5"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 90
        while not (folder / "stopped" / "metrics.jsonl").exists():
            assert time.monotonic() < end and process.poll() is None, process.communicate()
            time.sleep(0.1)
        os.kill(rank_of(process.pid, 1), signal.SIGSTOP)
        output = process.communicate(timeout=60)[0]
    finally:
        if process.poll() is None:
            process.kill()  # its ranks go with it
    assert process.returncode == 1, output
    assert "rank 1 after iteration" in output and "was stopped by a signal (SIGSTOP)" in output, output


def rank_of(launcher: int, rank: int) -> int:
    """The process id of a rank, a child of the launcher."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among the children of {launcher}")


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
    )
    assert done.returncode == 0 and "no rank made progress" not in done.stderr, done
