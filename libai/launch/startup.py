"""How long a process took before its first iteration, in the parts that a user can do something about."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class StartupTimes:
    """Seconds of each part; None where it was not measured or did not happen.

    `import_seconds`: from the start of the process until everything was imported and the config checked, the
    rendezvous of several ranks included. `build_seconds`: data, model, optimizer and, when resuming, the checkpoint.
    `compile_seconds`: tracing and compiling the training graph.
    """

    import_seconds: float | None
    build_seconds: float
    compile_seconds: float | None


def seconds_since_process_start() -> float | None:
    """The age of this process in seconds, by the kernel's clock (10 ms steps); None where /proc does not tell it."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # the second field, the program's name, may hold spaces and parentheses; start time is the 22nd
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
