"""What a parity check found: numbers, a verdict, and the words for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

#: relative difference of two losses that float32 cannot resolve: four units in the last place
ROUNDING = 4 * 2.0**-23
#: a tensor is measured against its own largest value, but not against less than this part of the largest of its kind:
#: the gradient of a key bias in attention is mathematically zero, and a ratio of two rounding errors says nothing
_SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class Difference:
    """A largest difference: relative and absolute, `where` (a name) and after which iteration (1 = the first)."""

    relative: float = 0.0
    absolute: float = 0.0
    where: str = ""
    iteration: int | None = None

    def __str__(self) -> str:
        if self.relative == 0.0:
            return "bitwise equal"
        after = f", iteration {self.iteration}" if self.iteration else ""
        return f"{self.relative:.1e} relative, {self.absolute:.1e} absolute ({self.where}{after})"


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`; `str()` is a table for people, `to_json()` the same for programs.

    Attributes:
        verdict: "same" (equal to the last bits), "within bound", or "broken".
        reason: the verdict in one sentence.
        first_broken: first iteration (1 = the first) in which the modes differ beyond the bound, or None.
        module: qualified name of the module that diverges first (the model's class name for its own forward), or None.
        stage: where it diverges: "build", "forward", "backward" or "update".
        differences: "loss", "gradients", "weights", "buffers" -> the largest difference of the modes.
        notes: facts that no difference shows.
        losses: mode -> total loss of every iteration.
    """

    verdict: str
    reason: str
    bound: float
    num_iters: int
    first_broken: int | None = None
    module: str | None = None
    stage: str | None = None
    differences: Mapping[str, Difference] | None = None
    notes: tuple[str, ...] = ()
    losses: Mapping[str, list[float]] | None = None

    @property
    def ok(self) -> bool:
        """True unless the verdict is "broken"."""
        return self.verdict != "broken"

    @property
    def exit_code(self) -> int:
        """0 for "same" and "within bound", 1 for "broken"."""
        return 0 if self.ok else 1

    def to_json(self) -> str:
        """All attributes as one JSON object; numbers that JSON has no word for (NaN, infinity) become strings."""
        return json.dumps(strict(asdict(self) | {"ok": self.ok}), indent=1)

    def __str__(self) -> str:
        rows = [("verdict", f"{self.verdict.upper()}: {self.reason}")]
        if self.module is not None:
            rows.append(("diverges in", f"{self.module} ({self.stage})"))
        if self.first_broken is not None:
            rows.append(("differs from", f"iteration {self.first_broken}"))
        rows += [(name, str(difference)) for name, difference in (self.differences or {}).items()]
        rows += [("note", text) for text in self.notes]
        width = max(len(title) for title, _ in rows) + 2
        text = "\n".join(f"{title:<{width}}{value}" for title, value in rows)
        return f"eager against graph over {self.num_iters} iterations, bound {self.bound:g}\n{text}{self._loss_table()}"

    def _loss_table(self) -> str:
        eager, graph = (self.losses or {}).get("eager", []), (self.losses or {}).get("graph", [])
        if not eager or not graph:
            return ""
        lines = [f"{'iteration':>9}  {'eager':>14}  {'graph':>14}  relative"]
        for iteration, (a, b) in enumerate(zip(eager, graph), 1):
            lines.append(f"{iteration:>9}  {a:>14.8g}  {b:>14.8g}  {relative_difference(a, b):.1e}")
        return "\n" + "\n".join(lines)


def relative_difference(a: float, b: float, floor: float = 0.0) -> float:
    """`|a - b|` over the larger of both magnitudes and `floor`; 0 for equal values (two NaN too), inf if one is not
    finite.

    >>> relative_difference(2.0, 1.0)
    0.5
    >>> relative_difference(float("nan"), 1.0)
    inf
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), floor)


def array_difference(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> tuple[float, float]:
    """`(relative, absolute)` largest difference of two arrays of one shape; relative to the largest magnitude in them
    or to `floor`. Equal bits, NaN included, are no difference; `(inf, inf)` when only one is not finite somewhere."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if np.array_equal(x, y, equal_nan=True):
        return 0.0, 0.0
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return math.inf, math.inf
    x, y = np.nan_to_num(x), np.nan_to_num(y)
    absolute = float(np.abs(x - y).max())
    return absolute / max(float(np.abs(x).max()), float(np.abs(y).max()), floor, 1e-300), absolute


def largest_difference(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], iteration: int | None = None
) -> Difference:
    """The largest relative difference over tensors of equal names; a tensor that only one side has is no match."""
    alone = sorted(set(a) ^ set(b))
    if alone:
        return Difference(math.inf, math.inf, f"{alone[0]} exists in one mode only", iteration)
    floor = _SMALLEST_SCALE * largest_magnitude(a.values())
    found = Difference()
    for name in a:
        relative, absolute = array_difference(a[name], b[name], floor)
        if relative > found.relative:
            found = Difference(relative, absolute, name, iteration)
    return found


def largest_magnitude(arrays: Iterable[np.ndarray]) -> float:
    """The largest finite absolute value in the arrays, 0 without any."""
    return max((float(np.nan_to_num(np.abs(x), posinf=0.0).max()) for x in arrays if x.size), default=0.0)


def strict(value: Any) -> Any:
    """`value` with text in place of the numbers that JSON has no word for (NaN, infinity)."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
