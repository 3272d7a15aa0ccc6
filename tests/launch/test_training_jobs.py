"""Real jobs of `tools/train.sh`: the number of processes and the mode change only the time, not the
results.
"""

import functools
import json
import time

import jobs
import numpy as np
import pytest

pytestmark = pytest.mark.launch


def settings(name, mode):
    return [f"graph.enabled={str(mode == 'graph').lower()}", f"train.output_dir={name}"]


@pytest.fixture(scope="module")
def one_process(folder, worker):
    """Return the folder of the eager run in one process, which the other runs must match."""
    done = worker.train_net("user_config.py", *settings("one", "eager"), cwd=folder)
    assert done.returncode == 0 and not done.errors, done
    return folder / "one"


@pytest.fixture(scope="module")
def two_processes(folder):
    """`two_processes(mode)` returns a job with accumulation, in which every rank prints a line. The
    8 samples of one process are 2 ranks x 2 micro-batches x 2.
    """

    @functools.cache
    def job(mode):
        words = [*settings(f"two_{mode}", mode), "train.num_accumulation_steps=2"]
        words.append("train.extra_hooks=[{_target_: user_models.Chatty}]")
        done = jobs.train_sh("user_config.py", 2, *words, cwd=folder, PYTHONWARNINGS="error")
        assert done.returncode == 0, done
        return done

    return job


def assert_same_curve(expected, found):
    for tag in ("train/loss", "train/lr", "train/grad_norm", "eval/val/loss"):
        a, b = (jobs.read_column(folder, tag) for folder in (expected, found))
        assert list(a) == list(b) and a, tag
        # measured: 1e-7, because sums over ranks have another order
        np.testing.assert_allclose(list(b.values()), list(a.values()), rtol=1e-5, err_msg=tag)
    assert len(jobs.read_column(found)) == 20


@pytest.mark.e2e
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_two_processes_equal_one(folder, one_process, two_processes, mode):
    two_processes(mode)
    assert_same_curve(one_process, folder / f"two_{mode}")
    summary = json.loads((folder / f"two_{mode}" / "summary.json").read_text())
    assert (summary["mode"], summary["status"]) == (mode, "finished")
    assert (
        "2 micro-batch x 2 data ranks x 2 accumulation"
        in (folder / f"two_{mode}" / "log.txt").read_text()
    )


@pytest.mark.e2e
def test_one_process_speaks_and_each_keeps_its_own_files(folder, two_processes):
    """The same for OneFlow's lines about missing hardware: rank 0 drops them, the other ranks keep
    them.

    There is no warning about a file that is left open either.
    """
    chatty = two_processes("eager")
    assert all(line.startswith(jobs.NOTICE) for line in chatty.stderr.splitlines()), chatty
    assert "rank 0 speaking" in chatty.stdout and "rank 1" not in chatty.stdout
    files = {path.name for path in (folder / "two_eager").iterdir()}
    assert {"log.txt", "log_rank1.txt", "rank_1.stderr"} <= files
    kept = (folder / "two_eager" / "rank_1.stderr").read_text()
    assert "libibverbs" in kept and "rank 1 speaking" in kept and "Warning" not in kept


@pytest.mark.e2e
def test_another_seed_would_be_noticed(folder, one_process, worker):
    """Negative control of `assert_same_curve`."""
    words = [*settings("seed", "eager"), "train.seed=5"]
    assert worker.train_net("user_config.py", *words, cwd=folder).returncode == 0
    with pytest.raises(AssertionError):
        assert_same_curve(one_process, folder / "seed")


@pytest.mark.promise
@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_a_rank_that_raises_ends_the_job_in_seconds(folder, mode):
    """Without libai, OneFlow's launcher waits forever (LiBai defect 13)."""
    hook = "train.extra_hooks=[{_target_: user_models.FailsOnRank, rank: 1}]"
    begin = time.monotonic()
    words = [*settings(f"fails_{mode}", mode), "train.train_iter=100000", hook]
    result = jobs.train_sh("user_config.py", 2, *words, cwd=folder, timeout=90)
    assert result.returncode == 1, result
    assert "planted on one rank" in result.stderr and "rank 1" in result.stderr, result
    assert time.monotonic() - begin < 60  # takes seconds on an idle machine; a hang would never end
