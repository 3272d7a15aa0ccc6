"""How soon OneFlow's threads get the interpreter's lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from libai.oneflow_fixes.fixes import is_on


def quick_thread_switches(seconds: float) -> AbstractContextManager[None]:
    """Let a thread that waits for the interpreter's lock have it after `seconds` while the block runs; Python's 5 ms.

    OneFlow's thread that runs the operations needs the lock now and then, and while it waits nothing is computed
    (docs/decisions/0009).
    """
    usual = sys.getswitchinterval()
    return _switch_interval(min(usual, seconds) if is_on("switch-interval") else usual)


def usual_thread_switches() -> AbstractContextManager[None]:
    """Python's own interval while the block runs: what a loop without our trainer has."""
    return _switch_interval(0.005)


@contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
