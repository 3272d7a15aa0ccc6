"""The controller with variants that sleep: blocks, refusals, failures, and processes that are gone afterwards."""

from __future__ import annotations

import time
from dataclasses import replace

import planted
import pytest
from launched import children

from libai.benchmark.cases import VariantSpec
from libai.benchmark.measure import (
    DifferentTraining,
    Settings,
    VariantFailed,
    VariantProcess,
    measure,
)
from libai.utils.errors import UserError


def run(tmp_path, *specs, settings=planted.QUICK, probes=()):
    return measure(planted.case_of(*specs, probes=probes), tmp_path, settings, lambda text: None)


def test_variants_are_interleaved_and_measured(tmp_path):
    outcome = run(tmp_path, planted.sleeper("a"), planted.sleeper("b", "--seconds", "0.02", "--first-seconds", "0.2"))
    a, b = outcome.everyone
    assert len(a.blocks) == len(b.blocks) == len(outcome.loads) == planted.QUICK.rounds
    assert min(a.blocks) >= 0.002 and min(b.blocks) >= 0.02
    assert a.losses == b.losses == pytest.approx([5.0, 2.5, 5.0 / 3])
    assert b.first_seconds >= 0.2
    assert b.launch_seconds > b.first_seconds
    assert a.facts["peak_rss_bytes"] > 2**20


def test_different_losses_are_refused(tmp_path):
    with pytest.raises(DifferentTraining, match=r"a and b were to train alike.*iteration 1.*5\.01.*above 0\.0001"):
        run(tmp_path, planted.sleeper("a"), planted.sleeper("b", "--loss", "5.01"))


def test_losses_may_diverge_by_as_much_as_a_perturbation_of_the_weights_explains(tmp_path):
    # 1e-5, 1e-4 and 1e-3 in iterations 1 to 3, and the perturbation half of it
    diverging, perturbed = planted.sleeper("b", "--drift", "1e-6"), planted.sleeper("perturbed", "--drift", "5e-7")
    outcome = run(tmp_path, planted.sleeper("a"), diverging, probes=(perturbed,))
    assert [m.spec.name for m in outcome.everyone] == ["a", "b"]
    assert all(measured.blocks for measured in outcome.everyone)
    assert outcome.rounding == {
        "variants": ["a", "b"],
        "iteration": 3,
        "difference": pytest.approx(1e-3),
        "allowed": pytest.approx(10 * 5e-4),
    }


@pytest.mark.parametrize("drift", ["0", "1e-10"])
def test_a_training_that_rounding_does_not_change_keeps_its_tolerance(tmp_path, drift):
    perturbed = planted.sleeper("perturbed", "--drift", drift)
    with pytest.raises(DifferentTraining, match=r"iteration 3 .*above 0\.0001"):
        run(tmp_path, planted.sleeper("a"), planted.sleeper("b", "--drift", "1e-6"), probes=(perturbed,))


def test_different_batches_are_refused(tmp_path):
    with pytest.raises(DifferentTraining, match="of a takes 4 samples and one of b takes 8"):
        run(tmp_path, planted.sleeper("a"), planted.sleeper("b", "--batch", "8"))


def test_a_variant_that_cannot_takes_no_part_and_says_why(tmp_path):
    outcome = run(tmp_path, planted.sleeper("a"), planted.sleeper("b", "--fail", "unavailable"))
    assert outcome.everyone[1].unavailable == "it cannot sleep here"
    assert outcome.everyone[1].blocks == []
    assert len(outcome.everyone[0].blocks) == planted.QUICK.rounds


def test_a_variant_that_dies_is_named_with_its_last_words(tmp_path):
    with pytest.raises(VariantFailed, match=r"(?s)variant b ended with exit code 3.*a planted death"):
        run(tmp_path, planted.sleeper("a"), planted.sleeper("b", "--fail", "dies"))


@pytest.mark.e2e
def test_a_variant_that_hangs_is_ended_in_time(tmp_path):
    start = time.monotonic()
    with pytest.raises(VariantFailed, match=r"variant a gave no answer within 0\.3 s"):
        run(
            tmp_path,
            planted.sleeper("a", "--fail", "hangs"),
            settings=replace(planted.QUICK, answer_seconds=0.3),
        )
    assert time.monotonic() - start < 60
    assert not children("sleeper.py")


@pytest.mark.e2e
def test_a_waiting_variant_takes_no_processor_time(tmp_path):
    outcome = run(
        tmp_path,
        planted.sleeper("a"),
        planted.sleeper("b", "--seconds", "0.3"),
        settings=replace(planted.QUICK, block_seconds=0.3),
    )
    assert outcome.everyone[0].waited_seconds > 0.5
    assert outcome.everyone[0].idle_share < 0.05


def test_a_command_that_is_no_variant_is_named(tmp_path):
    with pytest.raises(VariantFailed, match="variant a ended with exit code 0"):
        VariantProcess(VariantSpec("a", ("true",)), tmp_path, planted.QUICK)


@pytest.mark.parametrize("field", ["rounds", "block_seconds", "check_iterations", "loss_tolerance"])
def test_settings_that_measure_nothing_are_refused(field):
    with pytest.raises(UserError, match=field.replace("_", "-")):
        Settings(**{field: 0})
