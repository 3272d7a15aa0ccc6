"""Continuous integration prints what takes long, and fails nothing for it."""

from types import SimpleNamespace

import duration


def test_long_unmarked_tests_and_the_seconds_of_each_folder_are_printed():
    plugin = duration.TestSeconds()
    for nodeid, seconds, keywords in [
        ("a/b/x.py::t", 1.5, {"t": 1}),
        ("a/c/y.py::t[1/2]", 3.0, {"t": 1, "e2e": 1}),
        ("a/b/z.py::t", 0.5, {"t": 1}),
    ]:
        plugin.pytest_runtest_logreport(
            SimpleNamespace(nodeid=nodeid, duration=seconds, keywords=keywords, when="call")
        )
    assert duration.lines(plugin.folders) == ["     3.0s a/c", "     2.0s a/b"]
    assert duration.lines(plugin.unmarked) == ["     1.5s a/b/x.py::t"]
