"""`compare` tells a regression from noise, on planted reports."""

from __future__ import annotations

import numpy as np
import planted
import pytest

from libai.benchmark.compare import compare_reports, print_comparison
from libai.utils.errors import UserError


def report(speed: float = 1.0, machine: float = 1.0, noise: float = 0.005, seed: int = 0, peak: bool = True):
    """A report of a variant that takes `speed` times as long as usual, on a machine `machine` times as slow."""
    rng = np.random.default_rng(seed)

    def blocks(scale: float) -> list[float]:
        return list(0.01 * scale * machine * (1 + noise * rng.standard_normal(12)))

    everyone = [
        planted.planted("eager", blocks(speed)),
        planted.planted("eager (again)", blocks(speed), twin_of="eager"),
    ]
    if peak:
        gemm = planted.planted("gemm", blocks(2.0), "gemm", is_peak=True, facts={"flops_per_iter": 10**9})
        everyone.append(gemm)
    return planted.report_of(*everyone)


def verdict(old, new) -> str:
    (row,) = compare_reports(old, new).rows
    return row.verdict


def test_the_same_variant_on_another_day_is_the_same():
    assert verdict(report(seed=1), report(seed=2)) == "same"


def test_ten_per_cent_slower_is_a_regression():
    comparison = compare_reports(report(seed=1), report(1.1, seed=2))
    assert comparison.rows[0].verdict == "regression" and comparison.has_regression
    assert comparison.rows[0].ratio == pytest.approx(1.1, rel=0.02)


def test_ten_per_cent_faster_is_better():
    comparison = compare_reports(report(seed=1), report(0.9, seed=2))
    assert comparison.rows[0].verdict == "better" and not comparison.has_regression


def test_two_per_cent_within_the_noise_are_the_same():
    assert verdict(report(noise=0.02, seed=1), report(1.02, noise=0.02, seed=2)) == "same"


def test_very_noisy_runs_are_not_called_the_same(capsys):
    comparison = compare_reports(report(noise=0.3, seed=1), report(1.1, noise=0.3, seed=2))
    assert comparison.rows[0].verdict == "unclear"
    assert not comparison.has_regression
    print_comparison(comparison)
    assert "1 of 1 variants were too noisy to tell" in capsys.readouterr().out


def test_a_slower_machine_is_no_regression():
    comparison = compare_reports(report(seed=1), report(machine=1.5, seed=2))
    assert comparison.rows[0].verdict == "same"
    assert comparison.rows[0].basis == "peak"


def test_without_a_peak_a_slower_machine_looks_like_one():
    comparison = compare_reports(report(seed=1, peak=False), report(machine=1.5, seed=2, peak=False))
    assert comparison.rows[0].verdict == "regression"
    assert comparison.rows[0].basis == "time"


def test_a_variant_that_is_gone_is_a_regression():
    new = report(seed=2)
    new["cases"][0]["variants"][0]["unavailable"] = "it does not compile any more"
    comparison = compare_reports(report(seed=1), new)
    assert comparison.has_regression
    assert comparison.rows[0].about == ", it took no part: it does not compile any more"


def test_another_machine_and_a_busy_one_are_remarked():
    old, new = report(seed=1), report(seed=2)
    new["machine"]["cpu"] = "another CPU"
    new["cases"][0]["loads"] = [12.0]
    remarks = " ".join(compare_reports(old, new).remarks)
    assert "cpu was a CPU, is another CPU" in remarks
    assert "busy with other things during the new run" in remarks
    assert compare_reports(old, old).remarks == []


def test_reports_without_a_common_case_are_refused():
    new = report(seed=2)
    new["cases"][0]["title"] = "configs/other.py"
    with pytest.raises(UserError, match="no case in common"):
        compare_reports(report(seed=1), new)
