"""The ranks of one job on this machine until they end: signals, failures, hangs, exit code. For tools/launch.py.

Standard library only. Not here: how ranks are started (tools/launch.py) and what they tell (libai/utils/rank_notes.py).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from libai import runtime
from libai.utils import rank_notes

EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_RESUMABLE = 75

POLL_SECONDS = 0.05
# After a failure: the time for other ranks to report what they saw, then from SIGTERM to SIGKILL.
REPORT_SECONDS = 1.5
TERMINATE_SECONDS = 1.5
DEFAULT_STOP_SECONDS = 120.0
# Long enough for a large model's compilation, save or evaluation batch; LIBAI_STALL_TIMEOUT changes it.
DEFAULT_STALL_SECONDS = 1800.0
WATCH_SECONDS = 0.5
# Until oneflow's exit handlers are over; now and then, after many graphs, they never are.
DEFAULT_EXIT_SECONDS = 60.0
_STACK_SECONDS = 1.0
_TAIL_LINES = 60


@dataclass
class Rank:
    """A started process of the job; it leads its own session, so signals reach it only through this launcher."""

    number: int
    process: subprocess.Popen
    end_time: float | None = None
    intended: int | None = None
    was_stuck_leaving: bool = False
    stderr: Path | None = None
    stderr_start: int = 0

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. What a rank noted counts for one aborted later."""
        return self.intended if self.was_aborted_leaving else self.process.returncode

    @property
    def was_aborted_leaving(self) -> bool:
        """Whether oneflow ended it after its work was done (its heartbeat aborts a rank that misses another), or would
        not let it end."""
        expected = (-signal.SIGABRT, -signal.SIGSEGV, *((-signal.SIGKILL,) if self.was_stuck_leaving else ()))
        return self.intended is not None and self.process.returncode in expected

    def send(self, signum: int) -> None:
        """Signal the rank and whatever it has started (loader workers)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def read_stderr(self, max_lines: int = _TAIL_LINES) -> str:
        """Return the last lines that it has written to its file, without those that mean nothing; "" without one."""
        if self.stderr is None:
            return ""
        with contextlib.suppress(OSError), open(self.stderr, "rb") as file:
            file.seek(self.stderr_start)
            lines = rank_notes.drop_harmless(file.read().decode(errors="replace")).splitlines(keepends=True)
            return "".join(lines[-max_lines:])
        return ""


@dataclass
class Supervisor:
    """Watches the ranks of this machine: passes signals on, ends all when one fails, and works out the exit code."""

    ranks: list[Rank] = field(default_factory=list)
    stop_seconds: float = DEFAULT_STOP_SECONDS
    stall_seconds: float = 0.0
    exit_seconds: float = DEFAULT_EXIT_SECONDS
    notes_folder: str | None = None
    stop_signal: int | None = None
    has_stalled: bool = False
    _terminate_at: float | None = None
    _kill_at: float | None = None
    _watched_at: float = field(default_factory=time.monotonic)
    _progress: dict[int, rank_notes.Progress] = field(default_factory=dict)
    _still_seconds: float = 0.0
    _left_at: float | None = None

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass Ctrl-C, SIGTERM, a closed terminal and Ctrl-Z on to the ranks while the block runs."""
        handlers = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop, signal.SIGHUP: self._stop}
        handlers[signal.SIGTSTP] = self._pause
        # what the caller ignores (nohup, a script's background job) stays ignored
        ours = {s: h for s, h in handlers.items() if signal.getsignal(s) is not signal.SIG_IGN}
        previous = {signum: signal.signal(signum, handler) for signum, handler in ours.items()}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self.stop_signal is not None:
            self._kill_at = time.monotonic()  # asked twice: now
            return
        # a closed terminal asks for the same as SIGTERM: save and stop
        self.stop_signal = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self._kill_at = time.monotonic() + self.stop_seconds
        for rank in self.ranks:
            rank.send(self.stop_signal)

    def _pause(self, signum: int, frame: FrameType | None) -> None:
        for rank in self.ranks:
            rank.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self.ranks:  # reached when the shell continues this process
            rank.send(signal.SIGCONT)

    def wait(self) -> None:
        """Return when no rank runs any more."""
        while not self._poll():
            now = time.monotonic()
            if self._kill_at is not None and now >= self._kill_at:
                self.end(signal.SIGKILL)
            elif self._terminate_at is not None and now >= self._terminate_at:
                self._terminate_at = None
                self.end(signal.SIGTERM)
            elif now - self._watched_at >= WATCH_SECONDS:
                self._watch(now)
                self._end_stuck_leaving(now)
            time.sleep(POLL_SECONDS)
        if any(rank.code for rank in self.ranks):
            self.end(signal.SIGKILL)  # loader workers of ranks that could not tidy up

    def _poll(self) -> bool:
        """Note which ranks have ended, set the deadlines for the others, and return whether all have."""
        for rank in self.ranks:
            if rank.end_time is None and rank.process.poll() is not None:
                rank.end_time = time.time()
                if self.notes_folder is not None:
                    rank.intended = runtime.read_leaving(self.notes_folder).get(rank.number)
                if rank.code == EXIT_RESUMABLE:  # the others may still be writing their part of the checkpoint
                    self._set_deadlines(None, self.stop_seconds)
                elif rank.code != 0:
                    self._set_deadlines(REPORT_SECONDS, REPORT_SECONDS + TERMINATE_SECONDS)
        return all(rank.end_time is not None for rank in self.ranks)

    def _set_deadlines(self, terminate_in: float | None, kill_in: float) -> None:
        """Set when the ranks that still run are ended; an earlier deadline stays."""
        now = time.monotonic()
        if terminate_in is not None and self._terminate_at is None:
            self._terminate_at = now + terminate_in
        self._kill_at = min(now + kill_in, self._kill_at or float("inf"))

    def _watch(self, now: float) -> None:
        """End the job when a rank is at work and none has come on for `stall_seconds`.

        Ranks that never report (a program without libai's trainer) are not judged.
        """
        if self.notes_folder is None or not self.stall_seconds or self._kill_at is not None:
            self._watched_at = now
            return
        # a look that comes late was delayed by Ctrl-Z or a suspended machine, which held the ranks as well
        passed = min(now - self._watched_at, 2 * WATCH_SECONDS)
        self._watched_at = now
        progress = rank_notes.read_progress(self.notes_folder)
        running = [rank for rank in self.ranks if rank.end_time is None]
        is_working = any(rank.number in progress and progress[rank.number].is_working for rank in running)
        if progress != self._progress or not is_working:
            self._progress, self._still_seconds = progress, 0.0
            return
        self._still_seconds += passed
        if self._still_seconds >= self.stall_seconds:
            self.has_stalled, self._kill_at = True, now
            print(describe_stall(running, progress, self.notes_folder, self.stall_seconds), file=sys.stderr, flush=True)

    def _end_stuck_leaving(self, now: float) -> None:
        """End ranks whose work has been done on all of this machine for `exit_seconds` and that still do not end."""
        if self.notes_folder is None or len(runtime.read_leaving(self.notes_folder)) < len(self.ranks):
            return
        self._left_at = self._left_at or now
        if now - self._left_at >= self.exit_seconds:
            for rank in self.ranks:
                rank.was_stuck_leaving = rank.end_time is None
            self._kill_at = now

    def end(self, signum: int) -> None:
        """Signal every rank and what it has started."""
        for rank in self.ranks:
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


def find_first_failure(ranks: Sequence[Rank], notes: Mapping[int, Mapping], code: int) -> Rank:
    """Return the rank that failed first, in a job that ended with `code`, `EXIT_FAILED` or `EXIT_USER_MISTAKE`."""
    failed = [rank for rank in ranks if rank.code not in (0, EXIT_RESUMABLE)]
    if code == EXIT_USER_MISTAKE:
        failed = [rank for rank in failed if rank.code == EXIT_USER_MISTAKE]
    return min(failed, key=lambda rank: notes.get(rank.number, {}).get("time", rank.end_time))


def describe_failure(
    ranks: Sequence[Rank], notes: Mapping[int, Mapping], code: int, num_machines: int = 1
) -> str | None:
    """Return the line about the rank that failed first, or None when the user knows already.

    `notes`: rank → what `libai.runtime.guarded_main` left behind, with the time of the exception.
    """
    first = find_first_failure(ranks, notes, code)
    note = notes.get(first.number)
    if code == EXIT_USER_MISTAKE:
        if any(rank.number == 0 and rank.code == code for rank in ranks) or note is None:
            return None  # rank 0 has printed it itself
        return f"error: rank {first.number}: {note['reason']}"
    assert first.code is not None
    if note is not None:
        why = f"{note['reason']} ({note['where']}), exit code {first.code}"
    elif first.code == -signal.SIGALRM:
        why = (
            f"it waited {runtime.connect_seconds():g} s for the other ranks. Are all machines running, with the same "
            "ADDR, PORT and PROCS? LIBAI_CONNECT_TIMEOUT=<seconds> waits longer"
        )
    elif first.code < 0:
        name = signal.Signals(-first.code).name
        why = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        if name == "SIGABRT" and num_machines > 1:
            why += " (oneflow does that when it loses a rank of another machine: look at its output)"
    else:
        why = f"exit code {first.code}"
    others = "" if len(ranks) == 1 else "; the other ranks were ended"
    return f"launch: rank {first.number} failed first: {why}{others}."


def describe_stall(
    ranks: Sequence[Rank], progress: Mapping[int, rank_notes.Progress], folder: str, stall_seconds: float
) -> str:
    """Return one line that says where every rank of this machine is, and below it their Python stacks."""
    asked = [rank for rank in ranks if rank.number in progress]
    for rank in asked:  # the others have not come to where they listen to this signal
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, rank_notes.STACK_SIGNAL)
    end = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < end and not all(rank_notes.read_stack(folder, rank.number) for rank in asked):
        time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # a dump that has begun is done by then
    stacks = {rank.number: rank_notes.read_stack(folder, rank.number) for rank in asked}
    places = "; ".join(_describe_place(rank, progress.get(rank.number), stacks.get(rank.number)) for rank in ranks)
    line = (
        f"launch: no rank made progress for {stall_seconds:g} s: {places}. The job is ended. "
        "LIBAI_STALL_TIMEOUT=<seconds> waits longer, 0 for ever."
    )
    listings = [f"rank {n}, innermost call first:\n" + "\n".join(f"  {f}" for f in s) for n, s in stacks.items() if s]
    return "\n".join([line, *listings])


def _describe_place(rank: Rank, progress: rank_notes.Progress | None, stack: Sequence[str] | None) -> str:
    if progress is None:
        return f"rank {rank.number} has not begun"
    done = f"rank {rank.number} after iteration {progress.iteration}"
    if _is_stopped(rank.process.pid):
        return f"{done} was stopped by a signal (SIGSTOP)"
    if not stack:
        return f"{done} did not answer"
    # where libai or the user's code is; the frames inside oneflow say less
    return f"{done} at {next((f for f in stack if '/oneflow/' not in f), stack[0])}"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def read_notes(folder: str) -> dict[int, dict]:
    """Return the notes that failing ranks left in `folder`, by rank. A note cut short by a kill is left out."""
    notes = {}
    for path in Path(folder).glob("rank_*.json"):
        with contextlib.suppress(ValueError):
            note = json.loads(path.read_text(encoding="utf-8"))
            notes[note["rank"]] = note
    return notes
