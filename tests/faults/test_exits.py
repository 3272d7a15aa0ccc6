"""Ranks that exit, die or fail during real jobs: the job fails, names the first rank, and can be
resumed.
"""

import jobs
import pytest

pytestmark = [pytest.mark.launch, pytest.mark.e2e]


LEFT = ("os._exit(0)", "launch: rank 1 failed first: it left after iteration ")  # 2 or 3
LIMITED = (
    "import resource; resource.setrlimit(7, (8, 8))",
    "launch: rank 1 failed first: its error is above; ",
)
CALLED = ("sys.exit(0)", "error: rank 1: sys.exit(0) was called at ")


@pytest.mark.parametrize(
    ("setting", "statement", "said"),
    [
        ("graph.enabled=false", *LEFT),
        pytest.param("graph.enabled=false", *LIMITED, marks=pytest.mark.slow),
        pytest.param("graph.enabled=true", *CALLED, marks=pytest.mark.slow),
        pytest.param("graph.enabled=true", *LEFT, marks=pytest.mark.slow),
        pytest.param("model._target_=user_models.LeavesOnRank1", *CALLED, marks=pytest.mark.slow),
    ],
)
def test_one_of_two_ranks_that_exits_with_0_in_mid_run_is_a_failure(
    folder, setting, statement, said
):
    # the rank records its progress twice a second
    statement = f"import time; time.sleep(1); {statement}"
    done = jobs.train_sh(
        "user_config.py", 2, setting, "train.output_dir=exits", jobs.does(statement), cwd=folder
    )
    assert done.returncode == 1, done
    assert done.stderr.splitlines()[-1].startswith(said), done


@pytest.mark.slow
def test_the_error_of_a_rank_that_cannot_compile_is_shown_and_kept(folder):
    settings = (
        "graph.enabled=true",
        "model._target_=user_models.CannotCompileOnRank1",
        "train.output_dir=compile",
    )
    done = jobs.train_sh("user_config.py", 2, *settings, cwd=folder)
    assert done.returncode == 2, done
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "user_models.py" in error and error.startswith("error: rank 1: Cannot"), done
    kept = folder / "compile" / "errors"
    assert "user_models.py" in (kept / "rank_1.txt").read_text()
    assert "on another rank" in (kept / "rank_0.txt").read_text()


@pytest.mark.slow
def test_after_a_killed_rank_the_job_goes_on_to_the_same_curve(folder):
    settings = ("graph.enabled=false", "train.checkpointer.period=2")
    whole = jobs.train_sh("user_config.py", 2, *settings, "train.output_dir=whole", cwd=folder)
    assert whole.returncode == 0, whole
    kill = jobs.does("os.kill(os.getpid(), 9)", once=str(folder / "killed"))
    options = (*settings, kill, "train.output_dir=again", "--max-restarts", "1")
    done = jobs.train_sh("user_config.py", 2, *options, cwd=folder)
    assert done.returncode == 0, done
    said = [line for line in done.stderr.splitlines() if line.startswith("launch:")]
    assert "rank 1 failed first: killed by SIGKILL (out of memory?) after iteration " in said[0], (
        done
    )
    assert said[1] == "launch: starting again from iter_0000002; 0 restarts left.", done
    assert jobs.read_curve(folder / "again") == jobs.read_curve(folder / "whole")
