"""A test without a marker is short; a longer one is told so under continuous integration."""

from __future__ import annotations

import duration
import pytest

QUIET = duration.REFERENCE_SECONDS


@pytest.mark.parametrize(
    "wall, processor, calibration, markers, is_refused",
    [
        (1.5, 1.5, QUIET, set(), True),
        (0.9, 1.8, QUIET, set(), False),  # two threads
        (9.0, 0.9, QUIET, set(), False),  # a busy machine
        (2.5, 2.5, 3 * QUIET, set(), False),  # a slow machine
        (1.5, 1.5, QUIET / 3, set(), True),  # a fast machine has no tighter limit than a second
        (9.0, 9.0, QUIET, {"e2e"}, False),
    ],
)
def test_slow_and_busy_machines_fail_nothing(wall, processor, calibration, markers, is_refused):
    assert bool(duration.too_long(wall, processor, calibration, markers)) == is_refused
