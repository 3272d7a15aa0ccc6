"""OneFlow's threads: how soon they get the interpreter's lock, and the one that spins, kept out of the others' way."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from libai.oneflow_fixes.fixes import is_on

LOWEST_PRIORITY = 19
#: a thread that was busy for less than this share of the time does not spin
_SPINNING_SHARE = 0.4
_LEAST_SECONDS = 0.05


def quick_thread_switches(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Let a thread that waits for the interpreter's lock have it after `seconds` while the block runs; Python's 5 ms.

    OneFlow's thread that runs the operations needs the lock now and then, and while it waits nothing is computed
    (docs/decisions/0009).
    """
    usual = sys.getswitchinterval()
    return _switch_interval(min(usual, seconds) if is_on("switch-interval") else usual)


def usual_thread_switches() -> contextlib.AbstractContextManager[None]:
    """Python's own interval while the block runs: what a loop without our trainer has."""
    return _switch_interval(0.005)


@contextlib.contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class SpinningThread:
    """Finds the thread of this process that spins while compiled steps run, and gives it the lowest priority.

    OneFlow 0.9 schedules from one thread that polls for the end of a graph. Where ranks share cores, it takes time from
    the threads that compute and from those that carry messages between ranks. It is told by its processor time: it is
    the busiest thread of those that were there before the graph was compiled (the graph's own threads come after),
    the main thread aside. A user may always lower a priority; where /proc is missing, nothing changes.
    """

    def __init__(self, candidates: set[int]):
        self._before = {thread: seconds for thread, seconds in thread_seconds().items() if thread in candidates}
        self._before.pop(os.getpid(), None)
        self._start = time.perf_counter()

    @property
    def can_be_told(self) -> bool:
        """Whether enough time has passed to tell it from the others."""
        return time.perf_counter() - self._start >= _LEAST_SECONDS

    def lower_priority(self) -> int | None:
        """Lower its priority and return its id; None if no thread spins. Call it once, after waiting for some steps."""
        elapsed = time.perf_counter() - self._start
        if not self._before:
            return None
        now = thread_seconds()
        busy = {thread: now.get(thread, 0.0) - seconds for thread, seconds in self._before.items()}
        thread = max(busy, key=lambda candidate: busy[candidate])
        if busy[thread] < _SPINNING_SHARE * elapsed:
            return None
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY)
            return thread
        return None


def thread_ids() -> set[int]:
    """The threads of this process; empty where there is no /proc."""
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return set()


def thread_seconds() -> dict[int, float]:
    """Thread id → processor time in seconds; without those that ended meanwhile."""
    found = {}
    for thread in thread_ids():
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:
            found[thread] = int(file.read().split()[0]) / 1e9
    return found
