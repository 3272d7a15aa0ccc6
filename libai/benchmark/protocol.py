"""The line protocol between the benchmark and one variant, and the clock of every variant. Standard library only.

A variant is a program that reads JSON objects from standard input, one a line, and answers each with one line on
standard output. It first writes `{"event": "ready", "samples_per_iter": ...}`, with the global batch size. Then, until
its input ends,

    {"iterations": 20, "losses": true}

is answered by `{"event": "done", ...}` with these fields:

    seconds         time of all iterations together, with the device idle before and after
    losses          the loss of each iteration in full precision, if asked for
    cpu_seconds     processor time of all its processes within `seconds`               (optional)
    peak_rss_bytes  largest resident memory of all its processes so far, added up      (optional)
    tokens_per_iter tokens of one iteration                                            (optional)

A variant that cannot do what it is asked answers `{"event": "unavailable", "reason": TEXT}` and ends. Other lines on
standard output are ignored. A variant that waits for a line must not use the processor.
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
    """A variant cannot do what it is asked; the report shows the text."""


class Variant:
    """A training that `serve` can measure: set `samples_per_iter` and define `step` or `iterate`."""

    samples_per_iter: int

    def step(self) -> Any:
        """Make one iteration and return its loss, which `read` waits for."""
        raise NotImplementedError(f"{type(self).__name__} must define step() or iterate(count, losses)")

    def read(self, loss: Any) -> float:
        """Return the loss that `step` gave as a number."""
        return float(loss)

    def iterate(self, count: int, losses: bool) -> list[float]:
        """Make `count` iterations and wait until they are done; return every loss if asked, else the last."""
        found = []
        for number in range(count):
            loss = self.step()
            if losses or number == count - 1:
                found.append(self.read(loss))
        return found

    def begin(self) -> None:
        """Called right before the clock starts."""

    def finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a line; called after the clock has stopped."""
        return answer

    def run(self, iterations: int, losses: bool) -> dict[str, Any]:
        """Return the answer to a line. Without losses, one more iteration brings data and code into the caches."""
        if not losses:
            self.iterate(1, losses=False)
        self.begin()
        start = time.perf_counter()
        cpu_start = time.process_time()
        found = self.iterate(iterations, losses)
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start
        # VmHWM and not getrusage: Linux lets a new process inherit the ru_maxrss of the one that started it
        peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": found, "peak_rss_bytes": int(peak) * 1024}
        return self.finish(answer)


def serve(build: Callable[[], Variant], lines: Iterable[str], reply: Callable[[Mapping[str, Any]], object]) -> None:
    """Build a variant and answer `lines` until there are no more."""
    try:
        variant = build()
        reply({"event": READY, "samples_per_iter": variant.samples_per_iter})
        for line in lines:
            reply({"event": DONE, **variant.run(**json.loads(line))})
    except Unavailable as reason:
        reply({"event": UNAVAILABLE, "reason": str(reason)})


def take_stdout() -> TextIO:
    """Return standard output for answers; from now on everything that libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve_stdio(build: Callable[[], Variant]) -> None:
    """Serve a variant of one process on standard input and output."""
    answers = take_stdout()
    serve(build, iter(sys.stdin.readline, ""), lambda message: print(json.dumps(message), file=answers, flush=True))
