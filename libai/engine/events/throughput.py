"""Rates from durations: samples, items (tokens) and FLOP per second, and how iteration times are spread.

No clock and no tensors inside: whoever measures calls `update` with seconds, so the arithmetic can be tested exactly.
"""

from __future__ import annotations

import resource
from collections import deque

import numpy as np

#: updates kept for `Throughput.summary`
KEPT_UPDATES = 10_000


class Throughput:
    """Rates over the latest iterations (`rates`) and over the run (`summary`).

    Args:
        window: `rates` looks at the newest updates that together cover this many iterations (the last one at least).
    """

    def __init__(self, window: int = 20):
        if window < 1:
            raise ValueError(f"Throughput(window={window}): a window covers at least one iteration")
        self.window = window
        self.total_iters = 0
        self.total_seconds = 0.0
        self.total_samples = 0.0
        self.total_items = 0.0
        self._updates: deque[tuple[float, ...]] = deque(maxlen=KEPT_UPDATES)

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
        items = items or 0.0
        self._updates.append((seconds, samples, items, flops or 0.0, data_seconds, iters))
        self.total_iters += iters
        self.total_seconds += seconds
        self.total_samples += samples
        self.total_items += items

    def prolong(self, seconds: float) -> None:
        """Add time to the newest update: what its iterations still took after it was made. Nothing without one."""
        if self._updates:
            newest = self._updates.pop()
            self._updates.append((newest[0] + seconds, *newest[1:]))
            self.total_seconds += seconds

    def rates(self) -> dict[str, float]:
        """Over the window; empty before the first update.

        `samples_per_s`, `tokens_per_s`, `tflops` (the last two where given), `step_ms` and `data_ms`, all of them sums
        divided by summed time or iterations, so that they agree with each other.
        """
        covered = 0
        newest: list[tuple[float, ...]] = []
        for update in reversed(self._updates):
            if covered >= self.window:
                break
            newest.append(update)
            covered += int(update[-1])
        return self._rates(newest)

    def summary(self) -> dict[str, float]:
        """As `rates`, over the whole run (its latest `KEPT_UPDATES` updates), and how iterations differed: `_p10`,
        `_median` and `_p90` of `step_ms`, `samples_per_s` and `tokens_per_s`. Totals: `iters`, `seconds`, `samples`,
        `items`. An iteration counts with the mean of its update.
        """
        updates = [update for update in self._updates if update[0] > 0]
        rates = self._rates(updates)
        for name in ("step_ms", "samples_per_s", "tokens_per_s"):
            if name in rates:
                each = np.repeat([self._rates([u])[name] for u in updates], [int(u[-1]) for u in updates])
                for suffix, value in zip(("p10", "median", "p90"), np.percentile(each, [10, 50, 90])):
                    rates[f"{name}_{suffix}"] = float(value)
        totals = {"iters": self.total_iters, "seconds": self.total_seconds, "samples": self.total_samples}
        return {**rates, **totals, "items": self.total_items}

    def _rates(self, updates: list[tuple[float, ...]]) -> dict[str, float]:
        updates = [update for update in updates if update[0] > 0]  # a clock too coarse for the work gives no rate
        if not updates:
            return {}
        seconds, samples, items, flops, data_seconds, iters = np.array(updates, dtype=np.float64).T
        total = seconds.sum()
        rates = {
            "step_ms": float(total / iters.sum() * 1e3),
            "data_ms": float(data_seconds.sum() / iters.sum() * 1e3),
            "samples_per_s": float(samples.sum() / total),
        }
        if items.any():
            rates["tokens_per_s"] = float(items.sum() / total)
        if flops.any():
            rates["tflops"] = float(flops.sum() / total / 1e12)
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
