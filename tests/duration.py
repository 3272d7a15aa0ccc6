"""Limit unmarked tests to one second of a quiet machine, measured against a calibration.

Under continuous integration (`CI` is set) an unmarked test that takes longer fails and names the
marker to set. A slow or busy machine does not make tests fail: the smaller of wall time and
processor time counts, and the limit grows with the time of the calibration.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict

import pytest

SECONDS = 1.0
#: for imports and compilation by the first test of a process, and for other work on the core
SLACK = 1.5
#: processor time of `calibration_seconds` on a quiet core of an Intel Xeon with AVX-512, November
#: 2026
REFERENCE_SECONDS = 0.0235
#: markers of tests that may take longer
TIERS = ("promise", "e2e", "slow", "dist", "nightly")


def calibration_seconds() -> float:
    """Return the processor time of a fixed piece of Python, the best of three."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        values = {}
        for number in range(300_000):
            values[number % 1000] = number * 3 // 2
        seconds.append(time.process_time() - start)
    return min(seconds)


def processor_seconds() -> float:
    """Return the processor time so far of this process and of the child processes that it has
    waited for.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def too_long(wall: float, processor: float, calibration: float, markers: set[str]) -> str:
    """Return the message for a test that took too long for its markers, or an empty string."""
    slowness = max(1.0, calibration / REFERENCE_SECONDS)
    seconds = min(wall, processor) / slowness
    if seconds <= SLACK * SECONDS or markers.intersection(TIERS):
        return ""
    return (
        f"this test takes {seconds:.1f} s of a quiet machine; an unmarked one may take "
        f"{SECONDS:g} s. Make it shorter, or mark it `@pytest.mark.e2e`."
    )


class DurationLimit:
    """A pytest plugin that fails unmarked tests that take too long."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        wall = time.perf_counter()
        processor = processor_seconds()
        result = yield
        wall = time.perf_counter() - wall
        processor = processor_seconds() - processor
        if min(wall, processor) > SECONDS:  # calibrate only where it can matter
            message = too_long(
                wall, processor, calibration_seconds(), {mark.name for mark in item.iter_markers()}
            )
            if message:
                pytest.fail(message, pytrace=False)
        return result


class FolderSeconds:
    """A pytest plugin that prints the seconds of the tests in each folder, the slowest first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration

    def lines(self) -> list[str]:
        """Return a line for each folder, the slowest first."""
        slowest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
        return [f"{seconds:8.1f}s {folder}" for folder, seconds in slowest_first]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of each folder")
        for line in self.lines():
            terminalreporter.write_line(line)


def is_enforced() -> bool:
    """Return whether continuous integration runs the tests."""
    return bool(os.environ.get("CI"))
