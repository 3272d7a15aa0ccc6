"""Define the line protocol between the benchmark and a variant, and time the iterations.

Standard library only.

A variant is a program that reads JSON objects from standard input, one per line, and answers each
with one line on standard output. It first writes `{"event": "ready", "samples_per_iter": ...}` with
the global batch size. Until its input ends, it answers each request

    {"iterations": 20, "losses": true}

with `{"event": "done", ...}` and these fields:

    seconds         total time of all iterations; the device is idle before and after
    losses          loss of each iteration in full precision, if requested
    peak_rss_bytes  sum of the peak resident memory of all its processes so far   (optional)
    tokens_per_iter tokens per iteration                                          (optional)

A variant that cannot fulfill a request answers `{"event": "unavailable", "reason": TEXT}` and
exits. Other lines on standard output are ignored. A variant must not use the CPU while it waits for
a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

READY, DONE, UNAVAILABLE = "ready", "done", "unavailable"


class Unavailable(Exception):
    """A variant cannot fulfill a request. The report shows the message."""


class Variant:
    """A training loop that `serve` can measure.

    Subclasses set `samples_per_iter` and define `step` or `iterate`.
    """

    samples_per_iter: int

    def step(self) -> Any:
        """Run one iteration and return its loss, which may still be pending; `read` waits for the
        value.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define step() or iterate(count, losses)"
        )

    def read(self, loss: Any) -> float:
        """Return the result of `step` as a number."""
        return float(loss)

    def iterate(self, count: int, losses: bool) -> list[float]:
        """Run `count` iterations and wait until they finish.

        Return all losses if `losses`, else only the last.
        """
        found = []
        for number in range(count):
            loss = self.step()
            if losses or number == count - 1:
                found.append(self.read(loss))
        return found

    def begin(self) -> None:
        """Prepare for the measurement; called right before the clock starts."""

    def finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the completed answer; called after the clock has stopped."""
        return answer

    def run(self, iterations: int, losses: bool) -> dict[str, Any]:
        """Time the iterations and return the answer.

        Without losses, an untimed iteration first warms the caches.
        """
        if not losses:
            self.iterate(1, losses=False)
        self.begin()
        start = time.perf_counter()
        found = self.iterate(iterations, losses)
        seconds = time.perf_counter() - start
        # read VmHWM instead of calling getrusage: on Linux a new process inherits ru_maxrss from
        # its parent
        peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
        answer = {"seconds": seconds, "losses": found, "peak_rss_bytes": int(peak) * 1024}
        return self.finish(answer)


def serve(
    build: Callable[[], Variant], lines: Iterable[str], reply: Callable[[Mapping[str, Any]], object]
) -> None:
    """Build a variant and answer each request in `lines` through `reply`."""
    try:
        variant = build()
        reply({"event": READY, "samples_per_iter": variant.samples_per_iter})
        for line in lines:
            reply({"event": DONE, **variant.run(**json.loads(line))})
    except Unavailable as reason:
        reply({"event": UNAVAILABLE, "reason": str(reason)})


def take_stdout() -> TextIO:
    """Return a stream to standard output for the answers, and redirect everything else printed to
    standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve_stdio(build: Callable[[], Variant]) -> None:
    """Serve a single-process variant on standard input and output."""
    answers = take_stdout()
    serve(
        build,
        iter(sys.stdin.readline, ""),
        lambda message: print(json.dumps(message), file=answers, flush=True),
    )
