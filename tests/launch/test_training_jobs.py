"""Real jobs of `tools/train.sh`: the number of processes and the mode change only the time, not the
results.
"""

import json
import time

import jobs
import numpy as np
import pytest

pytestmark = pytest.mark.launch


def start(folder, name, processes, mode, *options):
    enabled = f"graph.enabled={str(mode == 'graph').lower()}"
    output = f"train.output_dir={name}"
    result = jobs.train_sh(
        "user_config.py", processes, enabled, output, *options, cwd=folder, PYTHONWARNINGS="error"
    )
    assert result.returncode == 0, result
    return result


@pytest.fixture(scope="module")
def one_process(folder):
    """Return `metrics.jsonl` of the eager run in one process, which the other runs must match."""
    result = start(folder, "one", 1, "eager")
    assert not [line for line in result.errors if "error" in line.lower()], result
    return folder / "one"


def assert_same_curve(expected, found):
    for tag in ("train/loss", "train/lr", "train/grad_norm", "eval/val/loss"):
        a, b = (jobs.read_column(folder, tag) for folder in (expected, found))
        assert list(a) == list(b) and a, tag
        # measured: 1e-7, because sums over ranks have another order
        np.testing.assert_allclose(list(b.values()), list(a.values()), rtol=1e-5, err_msg=tag)
    assert len(jobs.read_column(found)) == 20


@pytest.mark.e2e
@pytest.mark.slow
def test_a_user_model_outside_of_the_repository_trains_in_graph_mode(folder, one_process):
    start(folder, "one_graph", 1, "graph")
    assert_same_curve(one_process, folder / "one_graph")


@pytest.mark.e2e
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_two_processes_equal_one(folder, one_process, mode):
    """The same with accumulation: the 8 samples are 1 x 8, or 2 ranks x 2 micro-batches x 2."""
    start(folder, f"two_{mode}", 2, mode, "train.num_accumulation_steps=2")
    assert_same_curve(one_process, folder / f"two_{mode}")
    summary = json.loads((folder / f"two_{mode}" / "summary.json").read_text())
    assert (summary["mode"], summary["status"]) == (mode, "finished")
    assert (
        "2 micro-batch x 2 data ranks x 2 accumulation"
        in (folder / f"two_{mode}" / "log.txt").read_text()
    )


@pytest.fixture(scope="module")
def chatty(folder):
    """Run a job in which every rank prints a line."""
    return start(
        folder,
        "files",
        2,
        "eager",
        "train.train_iter=2",
        "train.extra_hooks=[{_target_: user_models.Chatty}]",
    )


@pytest.mark.e2e
def test_one_process_speaks_and_each_keeps_its_own_files(folder, chatty):
    """The same for OneFlow's lines about missing hardware: rank 0 drops them, the other ranks keep
    them.

    There is no warning about a file that is left open either.
    """
    assert all(line.startswith(jobs.NOTICE) for line in chatty.stderr.splitlines()), chatty
    assert "rank 0 speaking" in chatty.stdout and "rank 1" not in chatty.stdout
    assert {"log.txt", "log_rank1.txt", "rank_1.stderr"} <= {
        path.name for path in (folder / "files").iterdir()
    }
    kept = (folder / "files" / "rank_1.stderr").read_text()
    assert "libibverbs" in kept and "rank 1 speaking" in kept and "Warning" not in kept


@pytest.mark.e2e
def test_another_seed_would_be_noticed(folder, one_process):
    """Negative control of `assert_same_curve`."""
    start(folder, "seed", 1, "eager", "train.seed=5")
    with pytest.raises(AssertionError):
        assert_same_curve(one_process, folder / "seed")


@pytest.mark.promise
@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_a_rank_that_raises_ends_the_job_in_seconds(folder, mode):
    """Without libai, OneFlow's launcher waits forever (LiBai defect 13)."""
    hook = "train.extra_hooks=[{_target_: user_models.FailsOnRank, rank: 1}]"
    begin = time.monotonic()
    result = jobs.train_sh(
        "user_config.py",
        2,
        f"graph.enabled={str(mode == 'graph').lower()}",
        f"train.output_dir=fails_{mode}",
        "train.train_iter=100000",
        hook,
        cwd=folder,
        timeout=90,
    )
    assert result.returncode == 1, result
    assert "planted on one rank" in result.stderr and "rank 1" in result.stderr, result
    assert time.monotonic() - begin < 60  # takes seconds on an idle machine; a hang would never end
