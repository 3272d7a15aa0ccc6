"""The time that training takes: everything between the first iteration and the last, without what is not training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TrainingClock:
    """Counts seconds inside of `running()` blocks and stands still inside of `paused()` ones; blocks may be nested.

    Args:
        now: gives seconds from any fixed moment.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._counted = 0.0
        self._since: float | None = None

    @property
    def is_running(self) -> bool:
        """True while the time counts."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """What was counted so far."""
        return self._counted if self._since is None else self._counted + self._now() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        with self._set(True):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block."""
        with self._set(False):
            yield

    @contextmanager
    def _set(self, is_running: bool) -> Iterator[None]:
        before = self.is_running
        self._turn(is_running)
        try:
            yield
        finally:
            self._turn(before)

    def _turn(self, is_running: bool) -> None:
        self._counted = self.seconds
        self._since = self._now() if is_running else None
