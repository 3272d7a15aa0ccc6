"""Which lines of a model's code read what no seed governs and no checkpoint holds: a clock, the system's noise.

A graph reads it once, when it is traced. The calls are seen by Python's profiler, whatever names they were imported by.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from libai.forward.python_state import PACKAGES, describe_line, is_users_frame

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_SOURCES = {getattr(time, name): f"time.{name}" for name in _CLOCKS} | {os.urandom: "os.urandom"}


@contextmanager
def watched_clocks() -> Iterator[list[str]]:
    """A list that fills with `time.time at file:line: code` for what the block's code of the user reads."""
    found: dict[str, None] = {}
    names: list[str] = []

    def look(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        try:
            name = _SOURCES.get(function)
        except TypeError:  # it cannot be hashed
            return
        owner = getattr(function, "__self__", None)  # may be a tensor, whose == is another one
        if owner is datetime.datetime or owner is datetime.date:
            name = f"datetime.{function.__name__}" if function.__name__ in ("now", "utcnow", "today") else None
        where = _line_of_user(frame) if name is not None else None
        if where is not None and f"{name} at {where}" not in found:
            found[f"{name} at {where}"] = None
            names.append(f"{name} at {where}")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield names
    finally:
        sys.setprofile(before)


def _line_of_user(frame: FrameType | None) -> str | None:
    """`file:line: code` of the nearest caller that is no library; None for a clock that oneflow or libai reads."""
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] not in PACKAGES:
        if is_users_frame(frame) and not frame.f_code.co_filename.startswith("<"):
            return describe_line(frame)
        frame = frame.f_back
    return None
