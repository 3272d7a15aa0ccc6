"""Stop a job on a signal or a time limit, in the same iteration on all ranks.

A signal handler only sets a flag. The loop checks it at safe points: between iterations and between
batches of an evaluation. With several ranks, a tiny all-reduce about once a second gives all ranks
the same answer.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np

from libai.launch.guard import STOPPING, Interrupts, describe_quit, signals_handled
from libai.utils.distributed import all_reduce, get_world_size
from libai.utils.errors import EXIT_RESUMABLE
from libai.utils.rank_notes import own_folder, own_state
from libai.utils.screen import say

#: name of the question whether to stop the job; the answer is 0, a signal number or `TIME_LIMIT`
STOP = "stop"
TIME_LIMIT = 1000

#: seconds between two agreements of several ranks; a stop takes at most this long, plus one
#: iteration and the save
AGREE_SECONDS = 1.0
_MAX_POLLS_BETWEEN = 10_000


class StoppedFromOutside(SystemExit):
    """Raised when a signal or a time limit stops the run.

    If it is not caught, the process ends with `code`.

    `code` is `EXIT_RESUMABLE` if the run can be resumed from a checkpoint, and 128 + signal number
    otherwise.
    """


#: signals that save and stop
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agreement:
    """Questions that all ranks must answer alike at the same point of the loop.

    A "yes" from any rank counts.

    Every rank must ask the same questions and poll at the same points. Polls are counted, and only
    about one per second is collective. With one process there is nothing to agree on: `StopRequest`
    sets its answer immediately.
    """

    def __init__(self, seconds: float = AGREE_SECONDS):
        self._seconds = seconds
        self._questions: dict[str, Callable[[], int]] = {}
        #: name -> the agreed answer, which is the largest of any rank; without an entry it is 0
        self.answers: dict[str, int] = {}

    def ask(self, name: str, question: Callable[[], int]) -> None:
        """Ask `question() -> int` (0 is no) at every poll from now on, under `name`.

        Every rank must call this.
        """
        self._questions[name] = question

    def poller(self) -> Callable[[], None]:
        """Return a function to call once per iteration of a loop. With one process it does nothing.

        Each loop needs its own function, because the function measures how long an iteration takes.
        """
        return _PacedPoll(self.agree, self._seconds) if get_world_size() > 1 else lambda: None

    def agree(self, wanted: int = 1) -> int:
        """Agree on all answers now.

        Return the polls until the next agreement: the smallest `wanted` of all ranks.
        """
        if not self._questions:
            return _MAX_POLLS_BETWEEN
        found = all_reduce(
            np.array([*(question() for question in self._questions.values()), -wanted]), "max"
        )
        self.answers.update(
            (name, int(answer)) for name, answer in zip(self._questions, found) if answer
        )
        return -int(found[-1])


class _PacedPoll:
    """Call `agree` about once every `seconds`.

    It starts with every poll and then gradually skips more of them.
    """

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
            # At most double the polls: after fast iterations, slow ones must not delay the next
            # agreement for long.
            wanted = max(
                1, min(int(self._seconds / seconds_per_poll), 2 * self._polls, _MAX_POLLS_BETWEEN)
            )
        self._polls = self._left = self._agree(wanted)
        self._agreed_at = time.monotonic()


class StopRequest:
    """A flag that is set when this process is asked to stop.

    Call it to get 0, the signal number or `TIME_LIMIT`.

    `max_seconds` is the time limit, counted from the call of `handling_signals`. None means no
    limit.
    """

    def __init__(self, max_seconds: float | None = None):
        self._max_seconds = max_seconds
        self._code = 0
        self._interrupts = Interrupts()
        self._agreement: Agreement | None = None

    def __call__(self) -> int:
        return self._code

    def answer_in(self, agreement: Agreement) -> None:
        """Answer the question `STOP` of `agreement` with this flag from now on."""
        if get_world_size() > 1:
            agreement.ask(STOP, self)
        else:
            self._agreement = agreement

    def request(self, code: int = signal.SIGTERM) -> None:
        """Request a stop from inside the process, as the signal `code` would."""
        self._code = self._code or code
        if self._agreement is not None:
            self._agreement.answers[STOP] = self._code

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Turn SIGTERM, Ctrl-C and the end of the terminal (SIGHUP) into a stop request while the
        block runs.

        A second Ctrl-C ends the process at once.

        Under the launcher, which handles a second Ctrl-C itself, a signal only sets the request.
        Ignored signals (nohup) stay ignored. Outside the main thread, Python cannot handle signals,
        and they keep their usual effect.
        """
        own_state().listens = 1
        if self._code:
            self.request()
        limit = threading.Timer(self._max_seconds or 0.0, self.request, (TIME_LIMIT,))
        limit.daemon = True
        is_main = threading.current_thread() is threading.main_thread()
        with signals_handled(dict.fromkeys(_STOPS if is_main else (), self._receive)):
            if self._max_seconds is not None:
                limit.start()
            try:
                yield
            finally:
                limit.cancel()
                self._code = 0  # training may continue after a stop, as in a notebook
                self._interrupts = Interrupts()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        asked_before = self._code
        self.request(signum)
        if own_folder() is not None:
            return  # the launcher replies; its signal may also follow one from the terminal
        if self._interrupts.is_again(signum):
            say(describe_quit(own_state()))
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif signum == signal.SIGINT and not asked_before:
            say(STOPPING)


def describe_stop(code: int) -> str:
    """Return the cause of the stop, for the log."""
    return "the time limit train.max_seconds" if code == TIME_LIMIT else signal.Signals(code).name


def exit_code_of(code: int, is_resumable: bool) -> int:
    """Return the exit code of a process that was stopped.

    `code`: the number of the signal, or `TIME_LIMIT`.
    """
    if is_resumable:
        return EXIT_RESUMABLE
    return 128 + (signal.SIGTERM if code == TIME_LIMIT else code)
