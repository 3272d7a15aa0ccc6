"""Rates from durations: samples, items (tokens) and FLOP per second, and how iteration times are spread.

No clock and no tensors inside: whoever measures calls `update` with seconds, so the arithmetic can be tested exactly.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Iterable

import numpy as np

#: updates kept for `Throughput.summary`
KEPT_UPDATES = 10_000


class Throughput:
    """Rates over the latest iterations (`rates`) and over the run (`summary`).

    Args:
        window: `rates` looks at the newest updates that together cover this many iterations (the last one at least).
    """

    def __init__(self, window: int = 20):
        self.window = window
        #: rows of seconds, samples, items, flops, seconds of waiting for data, iterations
        self._updates: deque[np.ndarray] = deque(maxlen=KEPT_UPDATES)
        self._totals = np.zeros(6)

    @property
    def total_iters(self) -> int:
        """Iterations added so far."""
        return int(self._totals[5])

    @property
    def total_seconds(self) -> float:
        """Seconds added so far."""
        return float(self._totals[0])

    def update(
        self,
        seconds: float,
        samples: float,
        items: float | None = None,
        flops: float | None = None,
        data_seconds: float = 0.0,
        iters: int = 1,
    ) -> None:
        """Add `iters` iterations that took `seconds` in all, and what all ranks processed in them.

        `data_seconds`: the part of `seconds` spent waiting for data. `items`: tokens, where samples hold several.
        `flops`: operations, forward and backward.
        """
        row = np.array([seconds, samples, items or 0.0, flops or 0.0, data_seconds, iters])
        self._updates.append(row)
        self._totals += row

    def prolong(self, seconds: float) -> None:
        """Add time to the newest update: what its iterations still took after it was made. Nothing without one."""
        if self._updates:
            self._updates[-1][0] += seconds
            self._totals[0] += seconds

    def rates(self) -> dict[str, float]:
        """Over the window; empty before the first update.

        `samples_per_s`, `tokens_per_s`, `tflops` (the last two where given), `step_ms` and `data_ms`, all of them sums
        divided by summed time or iterations, so that they agree with each other.
        """
        covered = 0
        newest = []
        for row in reversed(self._updates):
            if covered >= self.window:
                break
            newest.append(row)
            covered += row[5]
        return _rates(_timed(newest).sum(axis=0))

    def summary(self) -> dict[str, float]:
        """As `rates`, over the whole run (its latest `KEPT_UPDATES` updates), and how iterations differed: `_p10`,
        `_median` and `_p90` of `step_ms`, `samples_per_s` and `tokens_per_s`. Totals: `iters`, `seconds`, `samples`,
        `items`. An iteration counts with the mean of its update.
        """
        rows = _timed(self._updates)
        rates = _rates(rows.sum(axis=0))
        for name in rates.keys() & {"step_ms", "samples_per_s", "tokens_per_s"}:
            each = np.repeat([_rates(row)[name] for row in rows], rows[:, 5].astype(int))
            for suffix, value in zip(("p10", "median", "p90"), np.percentile(each, [10, 50, 90])):
                rates[f"{name}_{suffix}"] = float(value)
        seconds, samples, items = self._totals[:3].tolist()
        return {**rates, "iters": self.total_iters, "seconds": seconds, "samples": samples, "items": items}


def _timed(rows: Iterable[np.ndarray]) -> np.ndarray:
    """The rows that took some time, as one array: a clock too coarse for the work gives no rate."""
    return np.array([row for row in rows if row[0] > 0]).reshape(-1, 6)


def _rates(row: np.ndarray) -> dict[str, float]:
    seconds, samples, items, flops, data_seconds, iters = row.tolist()
    if not seconds:
        return {}
    rates = {
        "step_ms": seconds / iters * 1e3,
        "data_ms": data_seconds / iters * 1e3,
        "samples_per_s": samples / seconds,
    }
    if items:
        rates["tokens_per_s"] = items / seconds
    if flops:
        rates["tflops"] = flops / seconds / 1e12
    return rates


def memory_gb(device: str = "cpu") -> dict[str, float]:
    """Memory of this process in GiB: `mem_gb`, the peak on the host, and with "cuda" `device_mem_gb`.

    oneflow 0.9.0 counts no device peak; the figure is what is in use on this GPU now, by its caching allocator, which
    keeps what it has once taken.
    """
    memory = {"mem_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device == "cuda":
        from libai.patches.internals import used_cuda_mib

        memory["device_mem_gb"] = used_cuda_mib() / 1024
    return memory
