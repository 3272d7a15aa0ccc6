"""The statistics of block times: drift cancels in pairs, noise is not taken for a difference, break-even arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from libai.benchmark.statistics import (
    Estimate,
    break_even,
    is_beyond_noise,
    noise_floor,
    paired_ratio,
    worst_loss_difference,
)


def drifting(scale: float, seed: int, rounds: int = 20, noise: float = 0.01) -> list[float]:
    """Block times of a variant on a machine that gets three times slower in the course of the run."""
    rng = np.random.default_rng(seed)
    return list(scale * np.linspace(1.0, 3.0, rounds) * (1 + noise * rng.standard_normal(rounds)))


def point(variant=0.8, first=2.0, floor=0.02):
    """The break-even of a variant whose iterations take `variant` s against 1 s."""
    ratio = paired_ratio([variant] * 5, [1.0] * 5)
    return break_even(("graph", "eager"), (first, 1.0), (variant, 1.0), ratio, floor)


def test_drift_that_both_see_cancels():
    ratio = paired_ratio(drifting(0.9, 1), drifting(1.0, 2))
    assert ratio.median == pytest.approx(0.9, rel=0.02)
    # the plain medians could not tell: they are spread over a factor of three
    assert Estimate.of(drifting(0.9, 1)).uncertainty > 10 * ratio.uncertainty


def test_a_variant_is_not_different_from_its_twin():
    a, twin, faster = drifting(1.0, 1), drifting(1.0, 2), drifting(0.9, 3)
    floor = noise_floor(a, twin)
    assert 0 < floor < 0.03
    assert not is_beyond_noise(paired_ratio(twin, a), floor)
    assert is_beyond_noise(paired_ratio(faster, a), floor)


def test_break_even_counts_the_iterations_that_repay_compilation():
    found = point(variant=0.75, first=2.0)
    # 1.25 s more for what comes before the steady iterations, 0.25 s less in each of them
    assert found["iterations"] == 5
    assert 2.0 + 4 * 0.75 == 1.0 + 4 * 1.0  # the two are level there
    assert "pays off after 5 iterations" in found["reason"]


def test_a_slower_mode_never_pays_off():
    found = point(variant=1.3)
    assert found["iterations"] is None
    assert found["reason"].startswith("never: graph takes 1.300 times as long")


def test_within_the_noise_nothing_pays_off():
    found = point(variant=0.99)
    assert found["iterations"] is None
    assert "within the noise (2.0%)" in found["reason"]


def test_the_largest_difference_of_losses_is_found_and_nan_is_infinite():
    assert worst_loss_difference([1.0, 2.0, 3.03], [1.0, 2.0, 3.0], 1e-4) == (pytest.approx(0.01), 3, 1e-4)
    assert worst_loss_difference([1.0, math.nan], [1.0, 2.0], 1e-4) == (math.inf, 2, 1e-4)
