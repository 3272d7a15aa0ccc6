"""What a case of the parity tests is compared with, and the comparison."""

from __future__ import annotations

import functools

from parity_cases import OPTIMIZERS, Case, Result, compare, expected_of, trained
from parity_variants import MOMENTUM, SCHEDULES, VARIANTS


@functools.cache
def expected(kind: str, name: str, accumulation: int = 1) -> Result:
    """The plain loop's result, computed once for both modes."""
    return expected_of(case_of(kind, name).with_(accumulation=accumulation))


def case_of(kind: str, name: str) -> Case:
    if kind == "optimizer":
        return Case(OPTIMIZERS[name])
    return Case(MOMENTUM, schedule=SCHEDULES[name]) if kind == "schedule" else VARIANTS[name]


def assert_equal_to_plain_loop(mode: str, kind: str, name: str, accumulation: int) -> None:
    case = case_of(kind, name).with_(accumulation=accumulation)
    right = expected(kind, name, accumulation if case.parts_matter else 1)
    difference = compare(trained(case, mode), right)
    assert difference.is_rounding(case), difference
    assert right.losses[0] != right.losses[-1]  # it has learned something, so that there was something to compare
