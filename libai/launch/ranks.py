"""The ranks of one job on this machine until they end: signals, failures, hangs, exit code. For libai/launch/job.py.

Standard library only. Not here: how ranks are started (libai/launch/job.py), what they tell
(libai/utils/rank_notes.py), when they hang (libai/launch/watch.py), what is said about their end
(libai/launch/report.py).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from libai.launch.guard import Interrupts, signals_handled
from libai.launch.watch import WATCH_SECONDS, StallWatch, describe_absent, describe_stall
from libai.utils import rank_notes
from libai.utils.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER_MISTAKE

POLL_SECONDS = 0.05
# After a failure: the time for other ranks to report what they saw, then from SIGTERM to SIGKILL.
REPORT_SECONDS = 1.5
TERMINATE_SECONDS = 1.5
DEFAULT_STOP_SECONDS = 120.0
# Until oneflow's exit handlers are over; now and then, after many graphs, they never are.
DEFAULT_EXIT_SECONDS = 60.0
_TAIL_LINES = 60


@dataclass
class Rank:
    """A started process of the job; it leads its own session, so signals reach it only through this launcher."""

    number: int
    process: subprocess.Popen
    end_time: float | None = None
    intended: int | None = None
    was_stuck_leaving: bool = False
    was_ended: bool = False
    has_left_early: bool = False
    last_progress: rank_notes.Progress | None = None
    absent: str = ""
    stack: str = ""
    crash: list[str] = field(default_factory=list)
    stderr: Path | None = None
    stderr_start: int = 0
    stderr_inode: int = 0

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. What a rank noted counts for one that a signal ended
        later, and one that left by itself without a note has failed, whatever its code."""
        if self.has_left_early:
            return EXIT_FAILED
        return self.intended if self.was_aborted_leaving else self.process.returncode

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise than well, or stopped with everything saved."""
        return self.end_time is not None and self.code not in (0, EXIT_RESUMABLE)

    @property
    def was_aborted_leaving(self) -> bool:
        """Whether a signal ended it after its work was done: oneflow's heartbeat aborts a rank that misses another, and
        its exit may crash or never end."""
        expected = [signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT]
        if self.was_stuck_leaving or self.was_ended:
            expected.append(signal.SIGKILL)
        return self.intended is not None and -self.process.returncode in expected

    def note_end(self, folder: str | None, was_asked_to_stop: bool) -> None:
        """Take up what is known about a rank that has just ended; `folder` of its notes, None where there is none.

        A program of the user's own may answer a stop signal with `os._exit(75)`.
        """
        self.end_time = time.time()
        if folder is None:
            return
        self.intended = rank_notes.read_leaving(folder).get(self.number)
        has_stopped = was_asked_to_stop and self.process.returncode == EXIT_RESUMABLE
        self.has_left_early = self.intended is None and self.process.returncode >= 0 and not has_stopped
        self.last_progress = rank_notes.read_progress(folder).get(self.number)
        self.crash = rank_notes.read_stack(folder, self.number, "crash")

    def send(self, signum: int) -> None:
        """Signal the rank and whatever it has started (loader workers)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def read_stderr(self, max_lines: int = _TAIL_LINES) -> str:
        """Return the last lines that it has written to its file, without those that mean nothing; "" without one."""
        if self.stderr is None:
            return ""
        with contextlib.suppress(OSError), open(self.stderr, "rb") as file:
            # a file that the run has begun anew, having moved an earlier run's aside, is read from its beginning
            is_same = os.fstat(file.fileno()).st_ino == self.stderr_inode
            file.seek(self.stderr_start if is_same else 0)
            lines = rank_notes.drop_harmless(file.read().decode(errors="replace")).splitlines(keepends=True)
            return "".join(lines[-max_lines:])
        return ""


@dataclass
class Supervisor:
    """Watches the ranks of this machine: passes signals on, ends all when one fails, and works out the exit code."""

    ranks: list[Rank] = field(default_factory=list)
    stop_seconds: float = DEFAULT_STOP_SECONDS
    exit_seconds: float = DEFAULT_EXIT_SECONDS
    notes_folder: str | None = None
    stall_watch: StallWatch | None = None
    stop_signal: int | None = None
    has_stalled: bool = False
    _is_stop_passed_on: bool = False
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _terminate_at: float | None = None
    _kill_at: float | None = None
    _watched_at: float = field(default_factory=time.monotonic)
    _left_at: float | None = None

    def handling_signals(self) -> contextlib.AbstractContextManager[None]:
        """Pass Ctrl-C, SIGTERM, a closed terminal and Ctrl-Z on to the ranks while the block runs."""
        stop = self._stop
        return signals_handled(
            {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGHUP: stop, signal.SIGTSTP: self._pause}
        )

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Remember what was asked for. Any number of signals asks for one stop; only Ctrl-C again, later, ends at once.

        Nothing is sent from here: a rank may just be on its way to `ranks`.
        """
        if self.stop_signal is None:
            # a closed terminal asks for the same as SIGTERM: save and stop
            self.stop_signal = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        if self._interrupts.is_again(signum):
            self._kill_at = time.monotonic()

    def _pass_stop_on(self) -> None:
        """Ask every rank once to save and stop."""
        if self.stop_signal is None or self._is_stop_passed_on:
            return
        self._is_stop_passed_on = True
        self._set_deadlines(None, self.stop_seconds)
        progress = {} if self.notes_folder is None else rank_notes.read_progress(self.notes_folder)
        for rank in self.ranks:
            at = progress.get(rank.number)
            # Python is not there yet, or locked while oneflow waits for other ranks: it could not act on SIGINT
            cannot_listen = self.notes_folder is not None and (at is None or at.phase == "meet")
            rank.send(signal.SIGTERM if cannot_listen else self.stop_signal)

    def _pause(self, signum: int, frame: FrameType | None) -> None:
        for rank in self.ranks:
            rank.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self.ranks:  # reached when the shell continues this process
            rank.send(signal.SIGCONT)

    def wait(self) -> None:
        """Return when no rank runs any more."""
        while not self._poll():
            self._pass_stop_on()
            now = time.monotonic()
            if self._kill_at is not None and now >= self._kill_at:
                self.end(signal.SIGKILL)
            elif self._terminate_at is not None and now >= self._terminate_at:
                self._terminate_at = None
                self.end(signal.SIGTERM)
            elif now - self._watched_at >= WATCH_SECONDS:
                self._watched_at = now
                self._watch(now)
                self._end_stuck_leaving(now)
            time.sleep(POLL_SECONDS)
        if any(rank.code for rank in self.ranks):
            self.end(signal.SIGKILL)  # loader workers of ranks that could not tidy up

    def _poll(self) -> bool:
        """Note which ranks have ended, set the deadlines for the others, and return whether all have."""
        for rank in self.ranks:
            if rank.end_time is None and rank.process.poll() is not None:
                rank.note_end(self.notes_folder, self._is_stop_passed_on)
                if rank.code == EXIT_RESUMABLE:  # the others may still be writing their part of the checkpoint
                    self._set_deadlines(None, self.stop_seconds)
                elif rank.code != 0:
                    self._name_absent(rank)
                    self._set_deadlines(REPORT_SECONDS, REPORT_SECONDS + TERMINATE_SECONDS)
        return all(rank.end_time is not None for rank in self.ranks)

    def _name_absent(self, rank: Rank) -> None:
        """When a rank has waited in vain where the ranks meet, find out where the others of this machine are."""
        at = rank.last_progress
        if self.notes_folder is None or self.stop_signal is not None or at is None:
            return
        waited = rank.code == -signal.SIGALRM and at.phase == "meet"
        waited = waited or rank_notes.read_failed_phase(self.notes_folder, rank.number) == "meet"
        if waited and not self._is_ending:
            running = [other for other in self.ranks if other.end_time is None]
            rank.absent = describe_absent(running, self.notes_folder)

    @property
    def _is_ending(self) -> bool:
        return self._kill_at is not None

    def _set_deadlines(self, terminate_in: float | None, kill_in: float) -> None:
        """Set when the ranks that still run are ended; an earlier deadline stays."""
        now = time.monotonic()
        if terminate_in is not None and self._terminate_at is None:
            self._terminate_at = now + terminate_in
        self._kill_at = min(now + kill_in, self._kill_at or float("inf"))

    def _watch(self, now: float) -> None:
        """End the job when its ranks have not got on for as long as their phase allows."""
        if self.notes_folder is None or self.stall_watch is None:
            return
        if self._is_ending:
            self.stall_watch.pause(now)
            return
        running = [rank for rank in self.ranks if rank.end_time is None]
        phase = self.stall_watch.look(now, [rank.number for rank in running])
        if phase is None:
            return
        self.has_stalled, self._kill_at = True, now
        line, stacks = describe_stall(running, phase, self.notes_folder, self.stall_watch.limits)
        for rank in running:
            rank.stack = stacks.get(rank.number, "it did not answer\n")
        print(line, *(text.rstrip() for text in stacks.values()), sep="\n", file=sys.stderr, flush=True)

    def _end_stuck_leaving(self, now: float) -> None:
        """End ranks whose work has been done on all of this machine for `exit_seconds` and that still do not end."""
        if self.notes_folder is None or len(rank_notes.read_leaving(self.notes_folder)) < len(self.ranks):
            return
        self._left_at = self._left_at or now
        if now - self._left_at >= self.exit_seconds:
            for rank in self.ranks:
                rank.was_stuck_leaving = rank.end_time is None
            self._kill_at = now

    def end(self, signum: int) -> None:
        """Signal every rank and what it has started."""
        for rank in self.ranks:
            if rank.end_time is None and not rank.was_stuck_leaving:
                rank.was_ended = True
            rank.send(signum)

    def exit_code(self) -> int:
        """Return the code of the whole job on this machine."""
        codes = {rank.code for rank in self.ranks}
        if codes == {0}:
            return 0
        if codes <= {0, EXIT_RESUMABLE}:
            return EXIT_RESUMABLE
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        return EXIT_USER_MISTAKE if EXIT_USER_MISTAKE in codes else EXIT_FAILED
