"""Build the JSON report: the measurements of every variant with intervals, and the conclusions
drawn from them.

Variants are interleaved, so block r of one variant is paired with block r of another. Machine drift
affects both blocks and cancels in their ratio. All intervals are 95 % bootstrap intervals of the
median, sampled with a fixed seed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from libai.benchmark.measure import Measured, difference_of
from libai.benchmark.variants import TWIN
from libai.utils.screen import format_table

#: above this noise, a machine's measurements are too uncertain for any verdict
TOO_NOISY = 0.1
FASTER, SLOWER, WITHIN_NOISE, UNDECIDED = "faster", "slower", "within noise", "undecided"


def estimate(values: Sequence[float]) -> dict[str, float]:
    """Return `{"median": ..., "low": ..., "high": ...}` for one value per block; low and high bound
    the interval.
    """
    sample = np.asarray(values)
    draws = np.random.default_rng(0).integers(0, len(sample), (4000, len(sample)))
    low, high = np.percentile(np.median(sample[draws], axis=1), [2.5, 97.5])
    return {"median": float(np.median(sample)), "low": float(low), "high": float(high)}


def paired_ratio(measured: Measured, baseline: Measured) -> dict[str, float]:
    """Return the estimated ratio of `measured` to `baseline` times, paired by block; below 1 is
    faster.
    """
    return estimate(np.asarray(measured.blocks) / np.asarray(baseline.blocks))


def noise_floor(twin_ratio: Mapping[str, float]) -> float:
    """Return the relative difference between two runs of the same variant; smaller differences are
    noise.

    The result is the larger of two values: the distance of the median ratio from 1, and half of its
    interval.
    """
    return max(abs(twin_ratio["median"] - 1.0), (twin_ratio["high"] - twin_ratio["low"]) / 2)


def verdict_of(ratio: Mapping[str, float], floor: float) -> str:
    """Return "faster" or "slower" if the ratio exceeds the noise and its whole interval lies on
    that side of 1.

    Otherwise return "within noise", or "undecided" if `floor` is infinite.
    """
    if math.isinf(floor):
        return UNDECIDED
    if abs(ratio["median"] - 1.0) <= floor or ratio["low"] <= 1.0 <= ratio["high"]:
        return WITHIN_NOISE
    return FASTER if ratio["median"] < 1.0 else SLOWER


def describe_case(
    title: str, everyone: Sequence[Measured], loads: Sequence[float], cores: int
) -> dict[str, Any]:
    """Return the report's section for one config."""
    trained = {
        measured.spec.name: measured for measured in everyone if measured.unavailable is None
    }
    baseline = next(iter(trained.values()))
    twin = trained.get(f"{baseline.spec.name}{TWIN}")
    noise = paired_ratio(twin, baseline) if twin else None
    floor = noise_floor(noise) if noise else math.inf
    is_noisy = floor > TOO_NOISY or max(loads) > cores + 1
    limit = math.inf if is_noisy else floor
    rows = []
    for measured in everyone:
        row = asdict(measured)
        row["name"] = row.pop("spec")["name"]
        if measured.blocks:
            row["step_seconds"] = estimate(measured.blocks)
            row.update(compare(measured, baseline, limit))
            row["verdict"] = row["verdict"] if measured is not baseline else ""
        rows.append(row)
    notes = [
        f"{m.spec.name} was excluded: {m.unavailable}."
        for m in everyone
        if m.unavailable is not None
    ]
    notes += _conclusions(trained, limit)
    worst = max(
        difference_of(*pair) for m in trained.values() for pair in zip(baseline.losses, m.losses)
    )
    notes.append(
        f"Losses agreed to {worst:.1e} (relative) in the first {len(baseline.losses)} iterations."
    )
    shown = f"{floor:.1%} between two interleaved runs" if twin else "unknown without a second run"
    notes.append(f"Noise: {shown} of {baseline.spec.name}. Smaller differences mean nothing.")
    if twin is None:
        notes.append(f"**Inconclusive**: {baseline.spec.name} ran once, so the noise is unknown.")
    elif is_noisy:
        notes.append(
            f"**Too noisy for a conclusion**: the load average was {min(loads):.1f} to "
            f"{max(loads):.1f} on {cores} cores. A busy machine favours variants with more "
            "threads. Measure again on a quiet machine."
        )
    return {"title": title, "loads": loads, "noise": noise, "variants": rows, "notes": notes}


def compare(measured: Measured, baseline: Measured, floor: float) -> dict[str, Any]:
    """Return the ratio of two variants, the verdict, and both as a sentence without a final
    period.
    """
    ratio = paired_ratio(measured, baseline)
    verdict = verdict_of(ratio, floor)
    text = (
        f"{measured.spec.name} takes {format_spread(ratio)} times as long as {baseline.spec.name} "
        f"({verdict})"
    )
    return {"ratio": ratio, "verdict": verdict, "text": text}


def _conclusions(trained: Mapping[str, Measured], floor: float) -> Iterator[str]:
    """Yield sentences on the trainers' overhead and on when compilation pays off."""
    for name, measured in trained.items():
        if f"raw-{name}" in trained:
            yield f"The trainer: {compare(measured, trained[f'raw-{name}'], floor)['text']}."
        eager = trained.get(name.replace("graph", "eager"), measured)
        if eager is not measured:
            yield f"Compilation: {break_even(measured, eager, floor)}."


def break_even(graph: Measured, eager: Measured, floor: float) -> str:
    """Describe after how many iterations a compiled variant makes up for its slower start."""
    found = compare(graph, eager, floor)
    if found["verdict"] != FASTER:
        return f"{found['text']}, so nothing shows that it pays off"
    saved = estimate(eager.blocks)["median"] * (1.0 - found["ratio"]["median"])
    late = graph.first_seconds - eager.first_seconds
    count = max(1, math.ceil((late + saved) / saved))
    return f"{found['text']}, so it pays off after {count} iterations"


def format_spread(found: Mapping[str, float], scale: float = 1.0) -> str:
    """Format a median with half of its interval relative to it, such as `12.3 ±4.0%`."""
    value = found["median"] * scale
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    off = (found["high"] - found["low"]) / 2 / found["median"]
    return f"{shown} ±{off:.0%}" if off >= 0.095 else f"{shown} ±{off:.1%}"


def to_text(case: Mapping[str, Any]) -> str:
    """Return the report on one config: its title, a row for each variant that ran, and the notes.

    It is Markdown that is readable on a terminal.
    """
    measured = [row for row in case["variants"] if row["blocks"]]
    tokens = max(row["tokens_per_iter"] or 0 for row in measured)
    speed = "tokens/s" if tokens else "samples/s"
    rows = [["variant", "ms/iter", "ratio", "verdict", speed, "first s", "RSS MiB"]]
    for row in measured:
        rows.append(
            [
                row["name"],
                format_spread(row["step_seconds"], 1e3),
                format_spread(row["ratio"]),
                row["verdict"],
                f"{(tokens or row['samples_per_iter']) / row['step_seconds']['median']:,.0f}",
                f"{row['first_seconds']:.2f}",
                f"{(row['peak_rss_bytes'] or 0) / 2**20:,.0f}",
            ]
        )
    table = textwrap.indent(format_table(rows, right=range(1, 7)), "    ")
    notes = "".join(f"* {note}\n" for note in case["notes"])
    return f"## {case['title']}\n\n{table}\n\n{notes}"
