"""The line protocol between a benchmark and one variant, as a variant speaks it. Standard library only.

A variant reads JSON objects, one per line, from standard input and answers each with one line on standard output. It
says `{"event": "ready", ...facts}` first. Then, as often as it is asked:

    {"command": "run", "iterations": 20, "losses": true}   make so many iterations, as fast as it can
    {"command": "quit"}                                    leave; so does the end of standard input

to which it answers `{"event": "done", ...}`, or `{"event": "unavailable", "reason": TEXT}` where it cannot, also
instead of "ready". The fields of an answer to `run`:

    seconds         of all iterations together, with the device idle before and after
    losses          with `"losses": true` one per iteration, in full precision; else []
    cpu_seconds     [before, after]: processor time of all its processes since they started    (may be left out)
    data_seconds    the part of `seconds` that was spent waiting for data                      (may be left out)
    run_cpu_seconds processor time of all its processes within `seconds`                       (may be left out)
    peak_rss_bytes  the largest resident memory of all its processes so far, added up          (may be left out)
    device_bytes    memory in use on the device; null on CPU                                   (may be left out)

Facts of "ready", all optional: `mode`, `device`, `processes`, `parameters`, `global_batch_size` (samples per
iteration), `tokens_per_iter`, `flops_per_iter`, `settings` (text about how its process was set up), `rss_bytes`.
While it waits for a line it must not use the processor. Lines on standard output that are no JSON object are ignored.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

READY, DONE, UNAVAILABLE = "ready", "done", "unavailable"


class Unavailable(Exception):
    """Raised by a variant that cannot do what it is asked; the text says why and is shown in the report."""


def encode(message: Mapping[str, Any]) -> str:
    """One line with its newline."""
    return json.dumps(message, separators=(",", ":")) + "\n"


def decode(line: str) -> dict[str, Any] | None:
    """The message in a line, or None when it holds none (a library has printed something)."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and {"event", "command"} & set(message) else None


class Variant:
    """What `serve` serves: subclass it and define `run`; see the module for the fields."""

    def facts(self) -> dict[str, Any]:
        """The fields of the answer "ready"."""
        return {}

    def run(self, iterations: int, losses: bool) -> dict[str, Any]:
        """Make `iterations` iterations; the fields of the answer."""
        raise NotImplementedError(f"{type(self).__name__} must define run(iterations, losses)")


def serve(build: Callable[[], Variant], lines: Iterable[str], reply: Callable[[Mapping[str, Any]], object]) -> None:
    """Build a variant and answer `lines` until one says quit or there are no more."""
    try:
        variant = build()
        reply({"event": READY, **variant.facts()})
    except Unavailable as reason:
        reply({"event": UNAVAILABLE, "reason": str(reason)})
        return
    for line in lines:
        message = decode(line)
        if message is None or message["command"] == "quit":
            return
        try:
            reply({"event": DONE, **_answer(variant, message)})
        except Unavailable as reason:
            reply({"event": UNAVAILABLE, "reason": str(reason)})


def serve_stdio(build: Callable[[], Variant]) -> None:
    """`serve` on standard input and output, for a variant of one process."""

    def reply(message: Mapping[str, Any]) -> None:
        sys.stdout.write(encode(message))
        sys.stdout.flush()

    serve(build, iter(sys.stdin.readline, ""), reply)


def _answer(variant: Variant, message: Mapping[str, Any]) -> dict[str, Any]:
    if message["command"] == "run":
        return variant.run(int(message["iterations"]), bool(message.get("losses")))
    raise Unavailable(f"there is no command {message['command']!r}")


def resources_of_this_process() -> dict[str, Any]:
    """`cpu_seconds` (one number), `peak_rss_bytes` and `rss_bytes` of this process; Linux."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    # VmHWM and not getrusage: Linux lets a new process inherit the ru_maxrss of the one that started it
    return {
        "cpu_seconds": time.process_time(),
        "peak_rss_bytes": int(status["VmHWM"].split()[0]) * 1024,
        "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
    }
