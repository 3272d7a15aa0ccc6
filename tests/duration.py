"""Print which folders and which unmarked tests take long, in continuous integration (`CI` is set).

Nothing fails here: seconds depend on the machine.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

#: seconds that an unmarked test may take on a quiet machine; longer ones are printed
SECONDS = 1.0
#: markers of tests that may take longer
TIERS = {"promise", "e2e", "slow", "dist", "nightly"}


class TestSeconds:
    """A pytest plugin that prints the seconds of the tests in each folder and the unmarked tests
    that took long, the slowest first.
    """

    __test__ = False  # pytest would collect a class of this name

    def __init__(self) -> None:
        self.folders: dict[str, float] = defaultdict(float)
        self.unmarked: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.folders[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
        if report.when == "call" and report.duration > SECONDS and not TIERS & set(report.keywords):
            self.unmarked[report.nodeid] = report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of each folder")
        terminalreporter.write_line("\n".join(lines(self.folders)))
        terminalreporter.section("mark these `@pytest.mark.e2e`, or make them shorter")
        terminalreporter.write_line("\n".join(lines(self.unmarked)))


def lines(seconds: dict[str, float]) -> list[str]:
    """Return a line for each name in `seconds`, the slowest first."""
    slowest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return [f"{seconds:8.1f}s {name}" for name, seconds in slowest_first]
