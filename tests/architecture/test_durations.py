"""A test without a marker is short.

In continuous integration a longer one fails and names the marker to set.
"""

from types import SimpleNamespace

import duration
import pytest

pytest_plugins = ["pytester"]
QUIET = duration.REFERENCE_SECONDS

TESTS = """
import time
import pytest


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_short():
    burn(0.01)


def test_waiting_costs_no_processor_time():
    time.sleep(LONG)


def test_long():
    burn(LONG)


@pytest.mark.e2e
def test_long_and_marked():
    burn(LONG)
"""


@pytest.mark.parametrize(
    "wall, processor, calibration, markers, is_refused",
    [
        (1.6, 1.6, QUIET, set(), True),
        (1.4, 1.4, QUIET, set(), False),
        (0.9, 1.8, QUIET, set(), False),  # two threads
        (9.0, 0.9, QUIET, set(), False),  # a busy machine
        (2.5, 2.5, 3 * QUIET, set(), False),  # a slow machine
        (5.0, 5.0, 3 * QUIET, set(), True),
        (1.6, 1.6, QUIET / 3, set(), True),  # a fast machine has no tighter limit than a second
        (0.9, 0.9, QUIET / 3, set(), False),
        (9.0, 9.0, QUIET, {"e2e"}, False),
    ],
)
def test_slow_and_busy_machines_fail_nothing(wall, processor, calibration, markers, is_refused):
    assert bool(duration.too_long(wall, processor, calibration, markers)) == is_refused


@pytest.mark.e2e
def test_the_failure_names_the_marker(pytester, monkeypatch):
    # the limit and the tests scale with the speed of this machine
    monkeypatch.setattr(duration, "SECONDS", 0.02)
    monkeypatch.setattr(duration, "REFERENCE_SECONDS", duration.calibration_seconds())
    pytester.makeini("[pytest]\nmarkers = e2e")
    pytester.makepyfile(TESTS.replace("LONG", "0.3"))
    result = pytester.inline_run(plugins=[duration.DurationLimit()])
    failed = {
        report.nodeid.rpartition("::")[2]: str(report.longrepr) for report in result.getfailures()
    }
    assert list(failed) == ["test_long"]
    assert "mark it `@pytest.mark.e2e`" in failed["test_long"]


def test_the_seconds_of_each_folder_are_added():
    plugin = duration.FolderSeconds()
    for nodeid, seconds in [("a/b/x.py::t", 1.0), ("a/c/y.py::t[1/2]", 3.0), ("a/b/z.py::t", 0.5)]:
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=seconds))
    assert plugin.lines() == ["     3.0s a/c", "     1.5s a/b"]
