"""Compute samples, items (tokens) and FLOP per second from durations, and percentiles of iteration
times.

This module contains no clock and no tensors. The caller measures the seconds and passes them to
`update`, so the arithmetic can be tested exactly.
"""

from __future__ import annotations

import resource
from collections import deque

import numpy as np

#: number of updates kept for `Throughput.summary`
KEPT_UPDATES = 10_000


class Throughput:
    """Computes rates of the latest update (`rates`) and of the run (`summary`)."""

    def __init__(self) -> None:
        #: one row per update: seconds, samples, items, flops, seconds spent waiting for data,
        #: iterations
        self._updates: deque[list[float]] = deque(maxlen=KEPT_UPDATES)

    def update(
        self,
        seconds: float,
        samples: float,
        items: float | None = None,
        flops: float | None = None,
        data_seconds: float = 0.0,
        iters: int = 1,
    ) -> None:
        """Add `iters` iterations that took `seconds` in total.

        Counts are totals over these iterations and all ranks.

        `samples`: number of samples. `items`: number of tokens, if samples contain several.
        `flops`: floating-point operations of forward and backward. `data_seconds`: the part of
        `seconds` spent waiting for data.
        """
        if seconds > 0:
            self._updates.append(
                [seconds, samples, items or 0.0, flops or 0.0, data_seconds, iters]
            )

    def prolong(self, seconds: float) -> None:
        """Add `seconds` to the newest update, for time spent after it was recorded.

        Does nothing without updates.
        """
        if self._updates:
            self._updates[-1][0] += seconds

    def rates(self) -> dict[str, float]:
        """Return the rates of the latest update; empty before the first one.

        The keys are `samples_per_s`, `step_ms` and `data_ms`, and `tokens_per_s` and `tflops` if
        items and flops were given. All values are sums divided by time or by iterations, so they
        are consistent with each other.
        """
        return _rates(self._updates[-1]) if self._updates else {}

    def summary(self) -> dict[str, float]:
        """Return the rates over the latest `KEPT_UPDATES` updates of the run, their percentiles,
        and totals.

        Percentiles over iterations have the suffixes `_p10`, `_median` and `_p90`, for `step_ms`,
        `samples_per_s` and `tokens_per_s`. Each iteration counts with the mean of its update. The
        totals are `iters`, `seconds`, `samples` and `items`. Empty before the first update.
        """
        if not self._updates:
            return {}
        rows = np.array(self._updates)
        totals = rows.sum(axis=0)
        rates = _rates(totals.tolist())
        for name in rates.keys() & {"step_ms", "samples_per_s", "tokens_per_s"}:
            each = np.repeat([_rates(row)[name] for row in self._updates], rows[:, 5].astype(int))
            for suffix, value in zip(("p10", "median", "p90"), np.percentile(each, [10, 50, 90])):
                rates[f"{name}_{suffix}"] = float(value)
        seconds, samples, items, *_, iters = totals.tolist()
        return {
            **rates,
            "iters": int(iters),
            "seconds": seconds,
            "samples": samples,
            "items": items,
        }


def _rates(row: list[float]) -> dict[str, float]:
    seconds, samples, items, flops, data_seconds, iters = row
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
    """Return the memory of this process in GiB: `mem_gb`, the peak on the host, and with "cuda"
    also `device_mem_gb`.

    oneflow 0.9.0 does not record a device peak. `device_mem_gb` is the memory that is now in use on
    this GPU by the caching allocator, which keeps all memory that it has ever allocated.
    """
    memory = {"mem_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device == "cuda":
        from libai.patches.internals import used_cuda_mib

        memory["device_mem_gb"] = used_cuda_mib() / 1024
    return memory
