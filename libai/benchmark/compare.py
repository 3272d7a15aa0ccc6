"""Two reports held against each other: a regression, or noise?

Runs at different times see a different machine. Where both reports have a peak (the matrix product that was interleaved
with the variants), times are compared as multiples of its time in the same rounds, which a slower machine changes
alike. A difference counts when it is larger than the noise floors and the uncertainties of both runs together.
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


@dataclass(frozen=True)
class Row:
    """One variant of one case. ratio: new to old, above 1 is slower.

    verdict: "regression", "better", "same", "unclear", or "missing" without figures. basis: "peak" when times are
    multiples of the peak's, else "time". about: the rest of its line.
    """

    case: str
    variant: str
    verdict: str
    about: str
    ratio: float | None = None
    basis: str = ""


@dataclass(frozen=True)
class Comparison:
    """The rows of all variants, and remarks about what may make the reports hard to compare."""

    rows: list[Row]
    remarks: list[str]

    @property
    def has_regression(self) -> bool:
        """True when a variant is slower, or is gone."""
        return any(row.verdict in ("regression", "missing") for row in self.rows)


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


def print_comparison(comparison: Comparison) -> None:
    """One line for each variant, the remarks, and the verdict."""
    for row in comparison.rows:
        print(f"{row.verdict:<11} {row.case}: {row.variant}{row.about}")
    for remark in comparison.remarks:
        print(f"note: {remark}")
    unclear = sum(row.verdict == "unclear" for row in comparison.rows)
    if comparison.has_regression:
        print("regression")
    elif unclear:
        print(f"no regression to be seen, but {unclear} of {len(comparison.rows)} variants were too noisy to tell")
    else:
        print("no regression")


def _compare_case(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Row]:
    found = {c["name"]: c for c in new["variants"]}
    for before in old["variants"]:
        if before["unavailable"] or before["is_peak"] or before["twin_of"]:
            continue
        after = found.get(before["name"])
        if after is None:
            yield Row(old["title"], before["name"], "missing", ", the new report does not have it")
        elif after["unavailable"]:
            yield Row(old["title"], before["name"], "missing", f", it took no part: {after['unavailable']}")
        else:
            yield _compare_variant(old, new, before, after)


def _compare_variant(
    old: Mapping[str, Any], new: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Row:
    peaks = [_peak(case, before["processes"]) for case in (old, new)]
    if all(peaks):
        basis, unit = "peak", "measured against the peak"
        estimates = [paired_ratio(c["blocks"], p["blocks"]) for c, p in zip((before, after), peaks) if p is not None]
    else:
        basis, unit = "time", "in seconds"
        estimates = [Estimate(**c["step_seconds"]) for c in (before, after)]
    floors = [case["noise"].get(str(before["processes"]), {}).get("floor", 0.0) for case in (old, new)]
    ratio = estimates[1].median / estimates[0].median
    threshold = max(LEAST_DIFFERENCE, max(floors) + sum(estimate.uncertainty for estimate in estimates))
    verdict = "same" if threshold <= UNCLEAR_BEYOND else "unclear"
    if ratio > 1.0 + threshold:
        verdict = "regression"
    elif ratio < 1.0 / (1.0 + threshold):
        verdict = "better"
    about = f" takes {ratio:.3f} times as long, {unit} (counts beyond ±{threshold:.1%})"
    return Row(old["title"], before["name"], verdict, about, ratio, basis)


def _peak(case: Mapping[str, Any], processes: int) -> Mapping[str, Any] | None:
    peaks = (c for c in case["variants"] if c["is_peak"] and not c["unavailable"] and c["processes"] == processes)
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
