"""The faults of a campaign, sampled from a seed.

Fault i of a seed is always the same, so it can be replayed.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Any

POINTS = ("before_train", "before_step", "after_step", "after_train")
ENOSPC, EIO, KILLED = 28, 5, -1


@dataclass(frozen=True)
class Fault:
    """A fault and the job that it hits.

    `kind`: "hook" (in the process, by `chaos_parts.Disturbed`), "signal" (from outside, to
    `target`, a rank's number or "launcher"), or "damage" (of the newest checkpoint, after a stop in
    mid-run). `details`: see `draw`.
    """

    number: int
    mode: str
    procs: int
    kind: str
    details: dict[str, Any]

    @property
    def rank(self) -> int | None:
        """The rank that it strikes, if there are several and only that one is to blame: all report
        losses of NaN.
        """
        rank = self.details.get("rank", self.details.get("target"))
        return (
            rank
            if self.procs > 1 and rank != "launcher" and self.details.get("act") != "nan"
            else None
        )

    def __str__(self) -> str:
        details = " ".join(f"{key}={value}" for key, value in self.details.items())
        return f"#{self.number} {self.mode} x{self.procs} {self.kind} {details}"


def draw(seed: int, number: int, num_procs: int | None = None) -> Fault:
    """Fault `number` of the campaign with this seed, in a job of `num_procs` ranks, or of 1 or
    2.
    """
    rng = random.Random(f"{seed}/{number}")
    mode, procs = rng.choice(("eager", "graph")), num_procs or rng.choice((1, 2))
    kind = rng.choices(("hook", "write", "signal", "damage"), weights=(8, 4, 6, 3))[0]
    details = {"hook": _hook, "write": _write, "signal": _signal, "damage": _damage}[kind](
        rng, procs
    )
    return Fault(number, mode, procs, kind, details)


def _hook(rng: random.Random, procs: int) -> dict[str, Any]:
    """Return a fault inside a rank at a hook point."""
    acts = ("raise", "memory", "exit", "os_exit", "kill", "abort", "stop", "sleep", "nan")
    point = rng.choice(POINTS)
    return {
        "act": rng.choice(acts),
        "point": point,
        "iteration": 0 if point == "before_train" else rng.randrange(0, 11),
        "rank": rng.randrange(procs),
        "code": rng.choice((0, 1, 3)),
    }


def _write(rng: random.Random, procs: int) -> dict[str, Any]:
    """Return a fault in a numbered fsync of rank 0, which fails once or kills the rank."""
    return {
        "act": "write",
        "call": rng.randrange(1, 40),
        "rank": 0,
        "code": rng.choice((ENOSPC, EIO, KILLED)),
    }


def _signal(rng: random.Random, procs: int) -> dict[str, Any]:
    """Return a signal to the launcher or a rank at a random moment."""
    names = [s.name for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)]
    target = rng.choice(("launcher", "launcher", *range(procs)))
    name = (
        rng.choice(names) if target == "launcher" else rng.choice(("SIGKILL", "SIGSTOP", "SIGSEGV"))
    )
    # seconds since the start: in the middle of imports, of building, of compiling, or of the
    # iterations
    return {
        "target": target,
        "signal": name,
        "iteration": rng.randrange(-1, 11),
        "delay": rng.random() * 1.5,
    }


def _damage(rng: random.Random, procs: int) -> dict[str, Any]:
    """Return damage to a file of the newest checkpoint: truncated, one bit flipped, emptied or
    removed.
    """
    how = rng.choice(("truncate", "flip", "empty", "remove"))
    return {
        "how": how,
        "file": rng.random(),
        "where": rng.random(),
        "iteration": rng.randrange(4, 11),
    }
