"""Shorten the time until OneFlow threads get the global interpreter lock (GIL)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from libai.patches.table import is_on


def quick_thread_switches(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Set the interpreter's switch interval to at most `seconds` inside the block; Python's default is 5 ms.

    The OneFlow thread that runs operations sometimes needs the GIL, and nothing is computed while it waits
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
