"""Two reports held against each other: a regression, or noise?

Runs at different times see a different machine. Where both reports have a peak (the matrix product that took turns with
the contenders), times are compared as multiples of its time in the same rounds, which a slower machine changes alike.
A difference counts when it is larger than the noise floors and the uncertainties of both runs together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from libai.benchmark.statistics import Estimate, paired_ratio
from libai.utils.errors import UserError

#: what never counts, even between two very quiet runs
LEAST_DIFFERENCE = 0.02
#: a pair of runs that would have to differ by more than this is too noisy to call them the same
UNCLEAR_BEYOND = 0.25
REGRESSION, BETTER, SAME, UNCLEAR, MISSING = "regression", "better", "same", "unclear", "missing"


@dataclass(frozen=True)
class Row:
    """One contender of one case. ratio: new to old, above 1 is slower; threshold: what would have counted.

    basis: "peak" when times are multiples of the peak's, else "time". Without figures `verdict` is "missing".
    """

    case: str
    contender: str
    verdict: str
    ratio: float | None = None
    threshold: float | None = None
    basis: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The rows of all contenders, and remarks about what may make the reports hard to compare."""

    rows: list[Row]
    remarks: list[str]

    @property
    def has_regression(self) -> bool:
        """True when a contender is slower, or is gone."""
        return any(row.verdict in (REGRESSION, MISSING) for row in self.rows)


def compare_reports(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Compare what both reports have in common; `UserError` when that is nothing."""
    new_cases = {case["title"]: case for case in new["cases"]}
    common = [case for case in old["cases"] if case["title"] in new_cases]
    if not common:
        raise UserError(
            f"the reports have no case in common: {', '.join(c['title'] for c in old['cases'])} and "
            f"{', '.join(new_cases)}. Compare runs of the same configs with the same overrides."
        )
    rows = [row for case in common for row in _compare_case(case, new_cases[case["title"]])]
    return Comparison(rows, list(_remarks(old, new)))


def _compare_case(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Row]:
    found = {c["name"]: c for c in new["contenders"]}
    for before in old["contenders"]:
        if before["unavailable"] or before["is_peak"] or before["twin_of"]:
            continue
        after = found.get(before["name"])
        if after is None or after["unavailable"]:
            reason = "the new report does not have it" if after is None else f"it took no part: {after['unavailable']}"
            yield Row(old["title"], before["name"], MISSING, reason=reason)
            continue
        yield _compare_contender(old, new, before, after)


def _compare_contender(
    old: Mapping[str, Any], new: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Row:
    peaks = [_peak(case, before["processes"]) for case in (old, new)]
    if all(peaks):
        basis = "peak"
        estimates = [paired_ratio(c["blocks"], p["blocks"]) for c, p in zip((before, after), peaks) if p is not None]
    else:
        basis = "time"
        estimates = [Estimate(**c["step_seconds"]) for c in (before, after)]
    floors = [case["noise"].get(str(before["processes"]), {}).get("floor", 0.0) for case in (old, new)]
    ratio = estimates[1].median / estimates[0].median
    threshold = max(LEAST_DIFFERENCE, max(floors) + sum(estimate.uncertainty for estimate in estimates))
    verdict = SAME if threshold <= UNCLEAR_BEYOND else UNCLEAR
    if ratio > 1.0 + threshold:
        verdict = REGRESSION
    elif ratio < 1.0 / (1.0 + threshold):
        verdict = BETTER
    return Row(old["title"], before["name"], verdict, ratio, threshold, basis)


def _peak(case: Mapping[str, Any], processes: int) -> Mapping[str, Any] | None:
    peaks = (c for c in case["contenders"] if c["is_peak"] and not c["unavailable"] and c["processes"] == processes)
    return next(peaks, None)


def _remarks(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for fact in ("cpu", "cores", "oneflow", "python"):
        before, after = old["machine"].get(fact), new["machine"].get(fact)
        if before != after:
            yield f"the reports are of different machines or software: {fact} was {before}, is {after}"
    for name, report in (("old", old), ("new", new)):
        if not all(case["noise"] for case in report["cases"]):
            yield f"the {name} report has no noise floor (--no-twin), so small differences may pass for real ones"
        if any(max(case["loads"]) > report["machine"]["cores"] + 1 for case in report["cases"]):
            yield f"the machine was busy with other things during the {name} run; its uncertainty is large"


def print_comparison(comparison: Comparison) -> None:
    """One line per contender and the verdict of all."""
    for row in comparison.rows:
        if row.ratio is None or row.threshold is None:
            print(f"{row.verdict:<11} {row.case}: {row.contender}, {row.reason}")
            continue
        unit = "measured against the peak" if row.basis == "peak" else "in seconds"
        print(
            f"{row.verdict:<11} {row.case}: {row.contender} takes {row.ratio:.3f} times as long, {unit} "
            f"(counts beyond ±{row.threshold:.1%})"
        )
    for remark in comparison.remarks:
        print(f"note: {remark}")
    unclear = sum(row.verdict == UNCLEAR for row in comparison.rows)
    if comparison.has_regression:
        print("regression")
    elif unclear:
        print(f"no regression to be seen, but {unclear} of {len(comparison.rows)} contenders were too noisy to tell")
    else:
        print("no regression")
