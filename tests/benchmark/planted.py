"""What the tests of the benchmark share: cases of variants that sleep, and reports made from them by hand."""

from __future__ import annotations

import sys
from pathlib import Path

from libai.benchmark.cases import Case, VariantSpec
from libai.benchmark.measure import Measured, Outcome, Settings
from libai.benchmark.report import describe_case, make_report

SLEEPER = str(Path(__file__).parent / "sleeper.py")
ROOT = str(Path(__file__).resolve().parents[2])
#: short blocks, and limits that a busy machine keeps
QUICK = Settings(rounds=2, block_seconds=0.02, check_iterations=3, start_seconds=60, answer_seconds=60)


def sleeper(name: str, *arguments: str, **fields) -> VariantSpec:
    """A variant that sleeps; see sleeper.py for the arguments."""
    return VariantSpec(name, (sys.executable, SLEEPER, *arguments), {"PYTHONPATH": ROOT}, **fields)


def case_of(*specs: VariantSpec, probes: tuple[VariantSpec, ...] = ()) -> Case:
    """A case that is about no config."""
    return Case("sleep.py", (), specs, probes=probes)


def planted(name: str, seconds: list[float], mode: str = "eager", first: float = 1.0, **fields) -> Measured:
    """A variant as if it had been measured."""
    spec_fields = {key: fields.pop(key) for key in ("twin_of", "is_peak", "processes") if key in fields}
    facts = {"global_batch_size": 8, "peak_rss_bytes": 2**28, "device": "cpu", **fields.pop("facts", {})}
    return Measured(
        VariantSpec(name, ("true",), mode=mode, **spec_fields),
        facts=facts,
        launch_seconds=3.0,
        first_seconds=first,
        losses=[2.0, 1.0],
        block_iterations=5,
        blocks=seconds,
        data_shares=[0.004] * len(seconds),
        **fields,
    )


def report_of(*everyone: Measured, loads=(0.5,)) -> dict:
    """The report of one case with these variants."""
    case = case_of(*(m.spec for m in everyone))
    machine = {"cpu": "a CPU", "cores": 2, "oneflow": "0.9.0", "python": "3.10"}
    return make_report([describe_case(case, Outcome(list(everyone), list(loads)))], QUICK, "a command", machine)
