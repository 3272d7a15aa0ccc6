"""What block times say: medians with their uncertainty, paired ratios, the noise floor, and the break-even point.

Variants are interleaved, so block r of one is paired with block r of another: the ratio of a pair is free of the drift
that both have seen. All intervals are 95 % bootstrap intervals of the median, drawn with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A median, the interval it lies in (`low`, `high`), and how single blocks are spread (`p10`, `p90`)."""

    median: float
    low: float
    high: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The estimate from one value per block, at least one."""
        sample = np.asarray(values, dtype=np.float64)
        # scipy.stats.bootstrap finds the same, and its import takes longer than the whole report
        draws = np.random.default_rng(0).integers(0, len(sample), (_RESAMPLES, len(sample)))
        low, high = np.percentile(np.median(sample[draws], axis=1), [2.5, 97.5])
        p10, p90 = np.percentile(sample, [10, 90])
        return cls(float(np.median(sample)), float(low), float(high), float(p10), float(p90), len(sample))

    @property
    def uncertainty(self) -> float:
        """Half of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median if self.median else math.inf


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """The fields of `Estimate.of(values)`, for a report."""
    return asdict(Estimate.of(values))


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """How `times` compare to `baseline`, block by block; below 1 is faster. Both have one value per round."""
    if len(times) != len(baseline):
        raise ValueError(f"{len(times)} blocks cannot be paired with {len(baseline)}")
    return Estimate.of(np.asarray(times) / np.asarray(baseline))


def noise_floor(times: Sequence[float], twin: Sequence[float]) -> float:
    """The relative difference that two runs of the very same variant show: smaller ones mean nothing.

    The larger of: how far the median ratio is from 1, and the half width of its interval.
    """
    ratio = paired_ratio(twin, times)
    return max(abs(ratio.median - 1.0), (ratio.high - ratio.low) / 2)


def is_beyond_noise(ratio: Estimate, floor: float) -> bool:
    """True when a ratio differs from 1 by more than the noise floor and its whole interval lies on one side of 1."""
    return abs(ratio.median - 1.0) > floor and (ratio.low > 1.0 or ratio.high < 1.0)


def break_even(
    names: tuple[str, str], starts: tuple[float, float], steps: tuple[float, float], ratio: Estimate, floor: float
) -> dict[str, Any]:
    """From which iteration on a variant has made up for its slower start against its baseline.

    All pairs are (variant, baseline): their names, the seconds of their first iteration (compilation included), the
    median seconds of the others. These are compared by the paired `ratio`, which drift does not touch. `iterations` of
    the answer is None when it never does; `reason` says it in words, with the ends of the interval.
    """
    name, baseline = names
    extra = (starts[0] - steps[0]) - (starts[1] - steps[1])

    def after(at_ratio: float) -> int | None:
        gain = steps[1] * (1.0 - at_ratio)
        return max(1, math.ceil(extra / gain)) if gain > 0 else None

    count = None
    if not is_beyond_noise(ratio, floor):
        why = f"{name} / {baseline} = {ratio.median:.3f} is within the noise ({floor:.1%})"
        reason = f"never, as far as this run can tell: {why}"
    elif ratio.median > 1.0:
        reason = f"never: {name} takes {ratio.median:.3f} times as long in every iteration"
    else:
        count = after(ratio.median)
        latest = after(ratio.high)
        reason = f"{name} pays off after {count} iterations ({after(ratio.low)} to {latest or 'never'})"
    return {"variant": name, "baseline": baseline, "iterations": count, "reason": reason}


def relative_difference(loss: float, other: float) -> float:
    """Relative to `other`; infinite when one of the two is not finite."""
    if not (math.isfinite(loss) and math.isfinite(other)):
        return math.inf
    return abs(loss - other) / max(abs(other), 1e-12)


def worst_loss_difference(
    losses: Sequence[float], baseline: Sequence[float], tolerance: float, allowed: Sequence[float] = ()
) -> tuple[float, int, float]:
    """`(relative difference, iteration, limit)` (1 = the first) where two series of losses differ most for their limit.

    The limit of iteration i is `tolerance`, or `allowed[i - 1]` where that is given and larger.
    """
    worst, where, its_limit = 0.0, 1, tolerance
    for index, pair in enumerate(zip(losses, baseline)):
        difference = relative_difference(*pair)
        limit = max(tolerance, allowed[index]) if index < len(allowed) else tolerance
        if difference / limit > worst / its_limit:
            worst, where, its_limit = difference, index + 1, limit
    return worst, where, its_limit
