"""How soon OneFlow's threads get the interpreter's lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from libai.oneflow_fixes.fixes import is_on


@contextmanager
def quick_thread_switches(seconds: float) -> Iterator[None]:
    """Let a thread that waits for the interpreter's lock have it after `seconds` while the block runs; Python's 5 ms.

    OneFlow's thread that runs the operations needs the lock now and then, and while it waits nothing is computed
    (docs/decisions/0009).
    """
    usual = sys.getswitchinterval()
    if is_on("switch-interval"):
        sys.setswitchinterval(min(usual, seconds))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@contextmanager
def usual_thread_switches() -> Iterator[None]:
    """Python's own interval while the block runs: what a loop without our trainer has."""
    ours = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        yield
    finally:
        sys.setswitchinterval(ours)
