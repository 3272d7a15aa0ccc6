"""Test the controller with variants that sleep: blocks, refusals, failures, and no processes left
behind.
"""

import sys

import pytest
from jobs import ROOT
from launched import children
from refusals import refused

from libai.benchmark import process
from libai.benchmark.measure import (
    DifferentTraining,
    Measured,
    Settings,
    check_same_training,
    measure,
)
from libai.benchmark.process import VariantFailed
from libai.benchmark.variants import VariantSpec

SLEEPER = str(ROOT / "tests/benchmark/sleeper.py")
QUICK = Settings(rounds=2, block_seconds=0.02, check_iterations=3)


def sleeper(name, *arguments):
    """Return a variant that sleeps; see sleeper.py for the arguments."""
    return VariantSpec(name, (sys.executable, SLEEPER, *arguments), {"PYTHONPATH": str(ROOT)})


def run(folder, *specs):
    return measure(specs, folder, QUICK, lambda text: None)


def test_variants_are_interleaved_and_measured(tmp_path):
    (a, b), loads = run(
        tmp_path, sleeper("a"), sleeper("b", "--seconds", "0.02", "--first-seconds", "0.2")
    )
    assert len(a.blocks) == len(b.blocks) == len(loads) == QUICK.rounds
    assert min(a.blocks) >= 0.002 and min(b.blocks) >= 0.02
    assert a.losses == b.losses == pytest.approx([5.0, 2.5, 5.0 / 3])
    assert b.first_seconds >= 0.2
    assert a.peak_rss_bytes > 2**20


def test_variants_that_train_differently_get_no_times(tmp_path):
    with pytest.raises(
        DifferentTraining, match=r"a and b train differently.*iteration 1.*5\.01.*above 0\.0001"
    ):
        run(tmp_path, sleeper("a"), sleeper("b", "--loss", "5.01"))


def test_a_command_that_does_not_exist_takes_no_part(tmp_path):
    (_, b), _ = run(tmp_path, sleeper("a"), VariantSpec("b", ("/no/such/program",)))
    assert b.unavailable == "/no/such/program cannot be started (No such file or directory)"


@pytest.mark.parametrize(
    "losses, samples, words",
    [
        ([2.0, 1.00005], 8, None),
        ([2.0, 1.0002], 8, "in iteration 2"),
        ([2.0, float("nan")], 8, "in iteration 2"),
        ([], 8, "reported no losses"),
        ([2.0, 1.0], 16, "8 and 16 samples"),
    ],
)
def test_losses_are_compared_to_the_tolerance(losses, samples, words):
    first = Measured(sleeper("a"), losses=[2.0, 1.0], samples_per_iter=8)
    other = Measured(sleeper("b"), losses=losses, samples_per_iter=samples)
    if words is None:
        check_same_training([first, other], 1e-4)
    else:
        with pytest.raises(DifferentTraining, match=words):
            check_same_training([first, other], 1e-4)


def test_a_variant_that_cannot_takes_no_part_and_says_why(tmp_path):
    (tmp_path / "some").mkdir()
    (a, b), _ = run(tmp_path / "some", sleeper("a"), sleeper("b", "--fail", "unavailable"))
    assert b.unavailable == "it cannot sleep here" and b.blocks == []
    assert len(a.blocks) == QUICK.rounds
    (tmp_path / "none").mkdir()
    with refused("no variant could train. a: it cannot sleep here"):
        run(tmp_path / "none", sleeper("a", "--fail", "unavailable"))


def test_a_variant_that_dies_is_named_with_its_last_words(tmp_path):
    with pytest.raises(
        VariantFailed, match=r"(?s)variant b ended with exit code 3.*a planted death"
    ):
        run(tmp_path, sleeper("a"), sleeper("b", "--fail", "dies"))


@pytest.mark.e2e
def test_a_variant_that_hangs_is_ended_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "ANSWER_SECONDS", 2.0)
    with pytest.raises(VariantFailed, match=r"variant a gave no answer within 2 s"):
        run(tmp_path, sleeper("a", "--fail", "hangs"))
    assert not children("sleeper.py")


def test_a_command_that_is_not_a_variant_is_named(tmp_path):
    with pytest.raises(VariantFailed, match="variant a ended with exit code 0"):
        run(tmp_path, VariantSpec("a", ("true",)))


@pytest.mark.parametrize("field", ["rounds", "block_seconds", "check_iterations", "loss_tolerance"])
def test_settings_that_measure_nothing_are_refused(field):
    with refused(f"--{field.replace('_', '-')} 0 is too small"):
        Settings(**{field: 0})
