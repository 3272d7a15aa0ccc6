"""Stopping a job from outside, by a signal or a time limit, and how all ranks come to act in the same iteration.

A signal handler only leaves a note. The loop asks at safe points (between iterations, between batches of an
evaluation); with several ranks a tiny all-reduce about once a second makes the answer the same everywhere.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

import numpy as np

from libai.launch.guard import QUITTING, STOPPING, Interrupts, signals_handled
from libai.utils.distributed import all_reduce, get_world_size
from libai.utils.errors import EXIT_RESUMABLE
from libai.utils.rank_notes import own_folder, own_state
from libai.utils.screen import say

#: the question "shall the job stop?"; its answer is a signal number or `TIME_LIMIT`
STOP = "stop"
TIME_LIMIT = 1000

#: seconds between two agreements of several ranks; what a stop costs at most, besides one iteration and the save
AGREE_SECONDS = 1.0
_MAX_POLLS_BETWEEN = 10_000


class StoppedFromOutside(SystemExit):
    """The run was stopped by a signal or a time limit. Uncaught, it ends the process with `code`.

    `code` is `EXIT_RESUMABLE` when a checkpoint holds the run, else 128 + signal number.
    """


class Agreement:
    """Questions to which all ranks need one answer at one point of the loop; a "yes" of any rank counts.

    Every rank must ask the same questions and poll at the same points. With one process an answer is there at the next
    poll. With several, polls are counted and only about one per second is collective.
    """

    def __init__(self, seconds: float = AGREE_SECONDS):
        self._seconds = seconds
        self._questions: dict[str, Callable[[], int]] = {}
        self.answers: dict[str, int] = {}

    def ask(self, name: str, question: Callable[[], int]) -> None:
        """Put `question() -> int` (0 is no) at every poll from now on, under `name`. Every rank must do so."""
        self._questions[name] = question

    def decide(self, name: str, answer: int) -> None:
        """Set an answer that every rank knows already, such as one that follows from the iteration."""
        self.answers[name] = answer

    def answer(self, name: str) -> int:
        """Return what was agreed on `name`: 0, or the largest answer of any rank. It stays until `take`."""
        return self.answers.get(name, 0)

    def take(self, name: str) -> int:
        """`answer(name)`, which is 0 again afterwards."""
        return self.answers.pop(name, 0)

    def poller(self) -> Callable[[], None]:
        """A function to call once per turn of a loop. Each loop needs its own, because it learns the time of a turn."""
        if get_world_size() == 1:
            return self._ask_here
        return _PacedPoll(self._ask_all_ranks, self._seconds)

    def _ask_here(self) -> None:
        for name, question in self._questions.items():
            answer = question()
            if answer:
                self.answers[name] = answer

    def _ask_all_ranks(self, wanted: int) -> int:
        """Agree on all answers and on the number of polls until the next time: the smallest that a rank wants."""
        if not self._questions:
            return _MAX_POLLS_BETWEEN
        found = all_reduce(np.array([*(question() for question in self._questions.values()), -wanted]), "max")
        self.answers.update((name, int(answer)) for name, answer in zip(self._questions, found) if answer)
        return -int(found[-1])


class _PacedPoll:
    """Calls `agree` so rarely that about `seconds` pass in between; begins with every turn."""

    def __init__(self, agree: Callable[[int], int], seconds: float):
        self._agree, self._seconds = agree, seconds
        self._polls = self._left = 1
        self._agreed_at: float | None = None

    def __call__(self) -> None:
        self._left -= 1
        if self._left > 0:
            return
        wanted = 1
        if self._agreed_at is not None:
            seconds_per_poll = max((time.monotonic() - self._agreed_at) / self._polls, 1e-9)
            # doubling at most: a quick stretch must not make the next, slow one deaf for long
            wanted = max(1, min(int(self._seconds / seconds_per_poll), 2 * self._polls, _MAX_POLLS_BETWEEN))
        self._polls = self._left = self._agree(wanted)
        self._agreed_at = time.monotonic()


class StopRequest:
    """A flag that this process was asked to stop; calling it gives 0, the signal's number, or `TIME_LIMIT`.

    `max_seconds`: ask for a stop this long after `handling_signals` was entered; None: never.
    """

    def __init__(self, max_seconds: float | None = None):
        self._max_seconds = max_seconds
        self._deadline: float | None = None
        self._code = 0
        self._interrupts = Interrupts()

    def __call__(self) -> int:
        if self._deadline is not None and not self._code and time.monotonic() >= self._deadline:
            self._code = TIME_LIMIT
        return self._code

    def request(self, code: int = signal.SIGTERM) -> None:
        """Ask for a stop from inside the process, as the signal `code` would."""
        self._code = self._code or code

    def handling_signals(self) -> AbstractContextManager[None]:
        """Turn SIGTERM and Ctrl-C into a request while the block runs; Ctrl-C again, later, ends the process at once.

        Under the launcher, which counts for itself, only the request counts. What the process ignores (nohup) stays
        ignored. Outside of the main thread Python cannot handle signals, and they keep their usual effect.
        """
        if self._max_seconds is not None:
            self._deadline = time.monotonic() + self._max_seconds
        own_state().listens = 1
        is_main = threading.current_thread() is threading.main_thread()
        return signals_handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT) if is_main else (), self._receive))

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        asked_before, self._code = self._code, self._code or signum
        if own_folder() is not None:
            return  # the launcher answers, and may have sent the first one a moment after the terminal has
        if self._interrupts.is_again(signum):
            say(QUITTING)
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif signum == signal.SIGINT and not asked_before:
            say(STOPPING)


def describe_stop(code: int) -> str:
    """Return what asked for the stop, for the log."""
    return "the time limit train.max_seconds" if code == TIME_LIMIT else signal.Signals(code).name


def exit_code_of(code: int, is_resumable: bool) -> int:
    """The process's exit code after a stop asked for by `code`."""
    if is_resumable:
        return EXIT_RESUMABLE
    return 128 + (signal.SIGTERM if code == TIME_LIMIT else code)
