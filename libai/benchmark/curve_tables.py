"""The table of a curve: one row per value, the contenders side by side, and what a reader must know beneath it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from libai.benchmark.curves import Curve
from libai.benchmark.statistics import NOT_AVAILABLE, format_spread


def curve_table(curve: Curve) -> tuple[list[str], list[list[str]]]:
    """`(header, rows)`: times, ratios to the first contender, throughput, and what the swept setting costs."""
    header = [curve.label]
    columns: list[list[str]] = [list(curve.values)]

    def add(title: str, cells: list[str]) -> None:
        if any(cell != NOT_AVAILABLE for cell in cells):
            header.append(title)
            columns.append(cells)

    field, unit = curve.rate
    for name, line in curve.lines.items():
        add(f"{name}, ms/iter", [_cell(c, "step_seconds", 1e3) for c in line])
    for name, line in curve.lines.items():
        to = next((c["ratio"]["to"] for c in line if c and "ratio" in c), None)
        baseline = to if to in curve.lines else next(iter(curve.lines))
        add(f"{name} / {baseline}", [_cell(c, "ratio") for c in line])
    for name, line in curve.lines.items():
        add(f"{name}, {unit}", [_cell(c, field) for c in line])
    if curve.kind:
        found = {row["contender"]: row for row in curve.cases[0]["scaling"]}
        for name, line in curve.lines.items():
            shown = [found.get(c["name"]) if c else None for c in line]
            add(f"{name}, efficiency", [_cell(row, "efficiency", 100.0, " %") for row in shown])
    elif curve.splits_a_batch:
        for name, line in curve.lines.items():
            add(f"{name}, cost to {curve.values[0]}", [_cost(c, line[0]) for c in line])
    for name, line in curve.lines.items():
        compiled = ["graph" in c["mode"] for c in line if c]
        if compiled and all(compiled):
            add(f"{name}, first s", [f"{c['first_seconds']:.2f}" if c else NOT_AVAILABLE for c in line])
    if not curve.kind:
        floors = [next(iter(case["noise"].values()), None) for case in curve.cases]
        add("noise", [NOT_AVAILABLE if found is None else f"{found['floor']:.1%}" for found in floors])
    return header, [list(row) for row in zip(*columns)]


def curve_notes(curve: Curve, cores: int) -> list[str]:
    """What holds for the whole table, each thing once."""
    loads = [load for case in curve.cases for load in case["loads"]]
    lines = [f"Load average in the rounds: {min(loads):.1f} to {max(loads):.1f} on {cores} cores."]
    if curve.splits_a_batch and not curve.kind:
        lines.append(
            f"`cost to {curve.values[0]}`: what an iteration takes longer than with {curve.key}={curve.values[0]}, of "
            "as many samples. The two were measured one after the other, so ± (percentage points) is that of both."
        )
    if not curve.kind:
        lines.append("Ratios are paired within one value. Different values were measured one after the other.")
    shares = {
        name: max(c["data_share"]["median"] for c in line if c)
        for name, line in curve.lines.items()
        if any(c and "data_share" in c for c in line) and all("data_share" in c for c in line if c)
    }
    if shares:
        text = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
        lines.append(f"Largest share of an iteration spent waiting for data: {text}.")
    absent: dict[str, list[str]] = {}
    for case in curve.cases:
        for c in case["contenders"]:
            if c["unavailable"]:
                absent.setdefault(f"{c['name']} took no part: {c['unavailable']}.", []).append(case["title"])
    lines += absent
    return lines


def _cell(c: Mapping[str, Any] | None, field: str, scale: float = 1.0, unit: str = "") -> str:
    return NOT_AVAILABLE if c is None or field not in c else format_spread(c[field], scale, unit)


def _cost(c: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> str:
    """`+8.0 % ±3.1%`: how much longer an iteration takes than at the first value; unpaired, so uncertainties add up."""
    if c is None or first is None or c is first:
        return NOT_AVAILABLE
    mine, other = c["step_seconds"], first["step_seconds"]
    ratio = mine["median"] / other["median"]
    off = math.hypot(*((one["high"] - one["low"]) / 2 / one["median"] for one in (mine, other))) * ratio
    return f"{(ratio - 1) * 100:+.1f} % ±{off * 100:.1f}"
