"""The time until OneFlow's threads get the interpreter's lock."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from libai.patches.table import is_on


def quick_thread_switches(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Give a thread that waits for the interpreter's lock the lock after `seconds` in the block; Python waits 5 ms.

    OneFlow's thread that runs the operations needs the lock now and then, and while it waits nothing is computed
    (docs/dev/decisions/0007).
    """
    usual = sys.getswitchinterval()
    return _switch_interval(min(usual, seconds) if is_on("switch-interval") else usual)


@contextlib.contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
