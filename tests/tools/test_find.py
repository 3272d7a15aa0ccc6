"""`libai find batch-size`: which sizes are tried, and real trainings under a real limit of memory."""

from __future__ import annotations

import json

import jobs
import pytest

from libai.cli.commands.runs import find as command
from libai.cli.commands.runs.find import Trial, _sizes, fastest, largest, search
from libai.launch.installation import LIBAI
from libai.utils.errors import UserError

CONFIG = str(jobs.ROOT / "tests/inputs/hungry.py")


@pytest.mark.parametrize(
    "limit, sizes, expected",
    [
        (100, range(1, 101), [1, 2, 4, 8, 16, 32, 64, 100]),
        (1, range(1, 101), [1, 2]),
        (0, range(1, 101), [1]),
        (5, range(1, 101), [1, 2, 4, 5, 6, 8]),
        (7, [1, 2, 3, 4, 6, 8, 12, 24], [1, 2, 4, 6, 8, 24]),
    ],
)
def test_sizes_are_doubled_then_bisected(limit, sizes, expected):
    trials = search(lambda size: Trial(size, 1.0 if size <= limit else None), list(sizes))
    assert [trial.micro_batch_size for trial in trials] == expected
    found = largest(trials)
    assert (found.micro_batch_size if found else 0) == max([s for s in sizes if s <= limit], default=0)


def test_the_smallest_of_the_fast_ones_is_suggested():
    trials = [Trial(1, 10.0), Trial(2, 97.0), Trial(4, 100.0), Trial(8, None)]
    assert fastest(trials) == trials[1] and fastest(trials[3:]) is None


def test_a_kept_global_batch_allows_its_divisors():
    assert _sizes(8, None, "2") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert _sizes(8, 24, "1") == [1, 2, 3, 4, 6, 8]
    assert _sizes(100, 24, "2") == [1, 2, 3, 4, 6, 12]
    with pytest.raises(UserError, match="is no multiple of 5 processes"):
        _sizes(8, 24, "5")


def find(*words, timeout=300):
    done = jobs.run([*LIBAI, "find", "batch-size", CONFIG, "--updates", "1", "--json", *words], timeout=timeout)
    assert done.returncode == 0, done
    return json.loads(done.stdout[done.stdout.index("[") :])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_memory_ends_the_search(mode):
    """A process may take 1500 MiB more than it has when it makes its model, and a sample takes 32 and more."""
    trials = find(f"graph.enabled={str(mode == 'graph').lower()}", "model.room=1500")
    fit = [trial["micro_batch_size"] for trial in trials if trial["samples_per_s"] is not None]
    assert 1 in fit and 4 <= max(fit) < 47
    assert {trial["reason"] for trial in trials if trial["micro_batch_size"] > max(fit)} == {"out of memory"}
    assert all(trial["samples_per_s"] for trial in trials if trial["micro_batch_size"] <= max(fit))


@pytest.mark.slow
def test_one_rank_out_of_memory_ends_the_size_for_all():
    """Of two ranks the second alone is limited."""
    trials = find("model.room=2000", "model.rank=1", "-n", "2", "--max", "64")
    sizes = {trial["micro_batch_size"]: trial["samples_per_s"] for trial in trials}
    assert sizes[1] and not sizes.get(64)
    assert any(trial["reason"] == "out of memory" for trial in trials)


@pytest.mark.slow
def test_a_kept_global_batch_is_accumulated():
    """Of 12 samples each of two ranks has 6: micro-batches of 1, 2, 3 and 6; all fit, and 3 is skipped."""
    trials = find("model.room=4000", "-n", "2", "--global-batch", "12", "graph.enabled=true")
    assert [trial["micro_batch_size"] for trial in trials] == [1, 2, 6]
    assert all(trial["samples_per_s"] > 0 for trial in trials)


def test_settings_that_the_search_makes_itself_are_refused():
    for setting in ("train.global_batch_size=8", "train.train_micro_batch_size=2", "train.num_accumulation_steps=2"):
        with pytest.raises(UserError, match=f"{setting}: a search for the batch size sets this"):
            command.run(["batch-size", CONFIG, setting, "--global-batch", "8"])


@pytest.mark.slow
def test_another_failure_is_no_lack_of_memory():
    done = jobs.run([*LIBAI, "find", "batch-size", CONFIG, "model.room=oops"])
    assert done.returncode != 0 and "not for want of memory" in done.stderr and "expected a whole number" in done.stderr
