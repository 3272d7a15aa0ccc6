"""The report: drift cancels in pairs, noise is not a difference, and the text is made from the
JSON.
"""

import numpy as np
import pytest

from libai.benchmark.measure import Measured
from libai.benchmark.report import (
    break_even,
    describe_case,
    noise_floor,
    paired_ratio,
    verdict_of,
)
from libai.benchmark.variants import VariantSpec

TIMES = [0.010, 0.011, 0.0105, 0.0102, 0.0104]


def planted(name, seconds, first=1.0, **fields):
    """Return a variant with made-up measurements."""
    spec = VariantSpec(name, ("true",))
    return Measured(
        spec,
        samples_per_iter=8,
        losses=[2.0, 1.0],
        first_seconds=first,
        blocks=list(seconds),
        **fields,
    )


def scaled(factor):
    return [factor * seconds for seconds in TIMES]


def drifting(scale, seed, rounds=20):
    """Return a variant measured on a machine that becomes three times slower during the run."""
    noise = 0.01 * np.random.default_rng(seed).standard_normal(rounds)
    return planted("drifting", scale * np.linspace(1.0, 3.0, rounds) * (1 + noise))


@pytest.fixture
def case():
    """Return a case with both modes, a loop, a duplicate, and an excluded variant."""
    eager = planted("eager", TIMES, tokens_per_iter=512, peak_rss_bytes=2**28)
    graph = planted("graph", scaled(0.5), first=1.5)
    absent = planted("raw-graph", [], unavailable="it clips otherwise")
    twin = planted("eager (again)", scaled(1.01))
    everyone = [eager, graph, planted("raw-eager", scaled(1.001)), absent, twin]
    return describe_case("sleep.py", everyone, [0.5], cores=2)


def test_drift_that_both_see_cancels_and_a_twin_is_not_different():
    one, twin, faster = drifting(1.0, 1), drifting(1.0, 2), drifting(0.9, 3)
    floor = noise_floor(paired_ratio(twin, one))
    assert 0 < floor < 0.03
    assert paired_ratio(faster, one)["median"] == pytest.approx(0.9, rel=0.02)
    assert verdict_of(paired_ratio(faster, one), floor) == "faster"
    assert verdict_of(paired_ratio(one, faster), floor) == "slower"
    assert verdict_of(paired_ratio(twin, one), floor) == "within noise"


@pytest.mark.parametrize(
    "step, words",
    [
        (0.75, "pays off after 5 iterations"),
        (1.3, "(slower), so nothing shows"),
        (0.99, "(within noise), so nothing shows"),
    ],
)
def test_compilation_pays_off_when_faster_steps_have_made_up_for_it(step, words):
    # 1.25 s more before the steady iterations, 0.25 s less in each: 2 + 4 * 0.75 == 1 + 4 * 1
    graph, eager = planted("graph", [step] * 5, first=2.0), planted("eager", [1.0] * 5)
    assert words in break_even(graph, eager, 0.02)


def test_a_case_has_ratios_verdicts_and_notes(case):
    rows = {row["name"]: row for row in case["variants"]}
    assert rows["graph"]["ratio"]["median"] == pytest.approx(0.5)
    assert rows["graph"]["verdict"] == "faster" and rows["raw-eager"]["verdict"] == "within noise"
    notes = "\n".join(case["notes"])
    assert "raw-graph was excluded: it clips otherwise." in notes
    assert (
        "The trainer: eager takes 0.999 ±0.0% times as long as raw-eager (within noise)." in notes
    )
    assert "pays off after" in notes
    assert "Noise: 1.0% between two interleaved runs of eager" in notes
    assert "Losses agreed to 0.0e+00" in notes and "Too noisy" not in notes


@pytest.mark.parametrize(
    "twin, load, verdict", [(1.2, 0.5, None), (1.0, 9.0, None), (1.0, 0.5, "faster")]
)
def test_a_machine_that_is_too_noisy_is_said_and_decides_nothing(twin, load, verdict):
    everyone = [
        planted("eager", TIMES),
        planted("graph", scaled(0.5)),
        planted("eager (again)", scaled(twin)),
    ]
    case = describe_case("sleep.py", everyone, [load], cores=2)
    assert case["variants"][1]["verdict"] == (verdict or "undecided")
    assert ("Too noisy for a conclusion" in case["notes"][-1]) == (verdict is None)
