"""Watch the ranks of this machine, which `oneflow.distributed.launch` has started.

Forwards signals, ends a rank that hangs, ends all ranks when one fails, removes OneFlow's harmless
lines from stderr, and reports which rank failed first and why. Time limits count only while this
process runs, not while the job is paused by Ctrl-Z or the machine is suspended. Uses only the
standard library. libai/launch/job.py starts the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from libai.launch.guard import (
    NOT_BEGUN,
    NOT_USERS,
    STOPPING,
    Interrupts,
    describe_quit,
    signals_handled,
    with_rank,
)
from libai.launch.machines import Ending, Machines, Report
from libai.launch.rank import STACK_SIGNAL, output_file
from libai.utils import rank_notes
from libai.utils.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER_MISTAKE
from libai.utils.installation import LIBRARIES
from libai.utils.rank_notes import OUTPUT_DIR, RankState
from libai.utils.screen import say, say_error

#: file of the outermost frame of every rank
_RANK = f"{LIBRARIES[1]}launch/rank.py"
POLL_SECONDS = 0.05
#: maximum seconds between two checks that count as time without progress; a suspended launcher may
#: check late
WATCH_SECONDS = 1.0
#: maximum time in seconds to wait for the stacks of ranks
STACK_SECONDS = 1.0
# Time for the other ranks to report their errors after a failure.
REPORT_SECONDS = 1.5
#: seconds after which a start prints what it is waiting for
SLOW_SECONDS = 2.0
#: seconds without progress after which the rank that the others wait for is named, at least this
#: share of the time limit
STALL_SECONDS, STALL_SHARE = 10.0, 0.1
#: phase before the first iteration -> what the start is waiting for
WAITS = {
    "import": "importing oneflow and the config",
    "meet": "importing oneflow, which waits for the other ranks",
    "build": "building data and model",
    "prepare": "rehearsing the first updates",
    "compile": "compiling the graph",
    "compare": "timing both modes",
}
ERRORS_FOLDER = "errors"
_TAIL_LINES = 60
_PR_SET_CHILD_SUBREAPER = 36
_NATIVE_HINT = (
    "Some operations of oneflow end the process on invalid inputs (sizes that do not match, an "
    "empty part, k=0): check the operations in that line and shortly before it"
)


@dataclass
class Rank:
    """A rank of this machine."""

    number: int
    folder: str
    state: RankState
    was_asked_to_stop: bool = False
    was_ended: bool = False
    lost_at: float = 0.0
    _progress: tuple[int, float] = (-1, 0.0)
    still_seconds: float = 0.0

    def note_loss(self, is_launcher_gone: bool) -> None:
        """Note the time if the process that records the rank's end is gone, and has not."""
        if self.lost_at or self.state.ended_at:
            return
        is_gone = bool(self.state.parent) and not _runs(self.state.parent)
        if (is_gone or is_launcher_gone) and not self.state.ended_at:
            self.lost_at = time.time()

    @property
    def is_lost(self) -> bool:
        """True if nothing recorded how the rank ended."""
        return bool(self.lost_at) and not self.state.ended_at

    @property
    def has_ended(self) -> bool:
        """True if the rank's program is no longer running."""
        return bool(self.state.ended_at) or self.is_lost

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal, or None while the rank runs.

        The code that a rank recorded at the end of its work takes precedence over how the process
        ended. A rank that exits without recording one has failed, whatever its exit code.
        """
        if not self.has_ended:
            return None
        if self.state.has_left:
            return self.state.code
        if self.was_asked_to_stop and self.state.status == EXIT_RESUMABLE:
            return EXIT_RESUMABLE  # the user's own program does not record its end
        if self.is_lost:
            return -signal.SIGKILL
        return self.state.status if self.state.status < 0 else EXIT_FAILED

    @property
    def has_failed(self) -> bool:
        """True if the rank has ended, except if it succeeded or was stopped with everything
        saved.
        """
        return self.code not in (None, 0, EXIT_RESUMABLE)

    @property
    def note(self) -> dict[str, Any]:
        """The rank's note about its failure (`libai.launch.guard`).

        Empty if there is no note, or if the process was killed while writing it.
        """
        with contextlib.suppress(ValueError, OSError):
            return json.loads(
                Path(self.folder, f"note_{self.number}.json").read_text(encoding="utf-8")
            )
        return {}

    @property
    def failed_at(self) -> float:
        """Time of the rank's failure, in seconds since the epoch."""
        return self.note.get("time") or self.state.ended_at or self.lost_at

    @property
    def position(self) -> tuple[int, int, int]:
        """Progress of the rank: updates that are done and begun, and collective operations."""
        state = self.state
        return state.iteration, state.begun, state.collectives

    @property
    def phase(self) -> str:
        """Phase in which the rank failed, or its current phase."""
        return self.note.get("phase") or self.state.phase.decode()

    def read_output(self) -> str:
        """Return the last lines of the rank's output, without harmless ones; "" if its file is
        missing.
        """
        with contextlib.suppress(OSError):
            text = output_file(self.folder, self.number).read_bytes()
            # A shorter file is a new one: the file of an earlier run was moved aside.
            start = self.state.output_start if len(text) >= self.state.output_start else 0
            lines = rank_notes.drop_harmless(text[start:]).decode(errors="replace")
            return "".join(lines.splitlines(keepends=True)[-_TAIL_LINES:])
        return ""

    def end_if_hung(self, seconds: float) -> None:
        """Kill the rank's program after `state.limit` seconds without progress.

        `seconds`: time since the last call.
        """
        state, progress = self.state, (self.state.beats, self.state.limit)
        self.still_seconds = self.still_seconds + seconds if progress == self._progress else 0.0
        self._progress = progress
        if not 0 < state.limit <= self.still_seconds or self.has_ended:
            return
        state.hung_seconds = state.limit
        _ask_for_stacks([self])
        with contextlib.suppress(ProcessLookupError):
            if state.pid:
                os.kill(state.pid, signal.SIGKILL)
        state.status, state.ended_at = (
            -signal.SIGKILL,
            time.time(),
        )  # its parent may be stopped and not record it

    @property
    def waited_in_vain(self) -> bool:
        """True if the rank was ended because it made no progress or because the other ranks did not
        appear.
        """
        return bool(self.state.hung_seconds) or (self.phase == "meet" and self.has_failed)

    @property
    def is_in_libraries(self) -> bool:
        """True if the rank's innermost Python frame is in oneflow or libai, as while it waits for
        other ranks.
        """
        return any(part in frame for frame in self.read_stack()[:1] for part in LIBRARIES)

    def read_stack(self, name: str = "stack") -> list[str]:
        """Return the frames of the main thread when the stack was requested or, for "crash", of the
        thread that crashed when a signal ended it, innermost first; empty without any.
        """
        try:
            path = Path(self.folder, f"{name}_{self.number}")
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        threads = [block for block in text.split("\n\n") if "  File " in block]
        # faulthandler writes the newest thread first, and the main thread last
        if text.startswith("Fatal"):
            threads = [block for block in threads if block.startswith("Current thread")]
        thread = threads[-1] if threads else ""
        return [line.strip() for line in thread.splitlines() if line.strip().startswith("File ")]

    def where(self) -> str:
        """Return the rank's progress as text: `after iteration 3, in the phase 'save', at File
        …`.
        """
        done = (
            f"after iteration {self.state.iteration}"
            if self.state.iteration
            else "before the first iteration"
        )
        phase = (
            f", in the phase {self.phase!r}" if self.phase not in ("", "import", "train") else ""
        )
        # A rank that oneflow aborted because it lost another rank was not asked for its stack.
        frame = self.frame() or self.frame("crash")
        return f"{done}{phase}, {f'at {frame}' if frame else 'and did not answer'}"

    def frame(self, name: str = "stack") -> str:
        """Return the innermost frame, preferably one in the user's code.

        `name` is as in `read_stack`.
        """
        stack = self.read_stack(name)
        for silent in (NOT_USERS, NOT_USERS[:3], NOT_USERS[:1], ()):
            found = next(
                (frame for frame in stack if not any(part in frame for part in silent)), None
            )
            if found is not None and _RANK not in found:
                return found
        return ""


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def _ask_for_stacks(ranks: Sequence[Rank]) -> None:
    """Ask programs to write their Python stacks, and wait for them for at most `STACK_SECONDS`.

    This also works while a program waits in native code.
    """
    asked = [rank for rank in ranks if rank.state.pid and not rank.state.ended_at]
    for rank in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.state.pid, STACK_SIGNAL)
    end = time.monotonic() + STACK_SECONDS
    # faulthandler writes the main thread last, and its frame in rank.py at the end
    while time.monotonic() < end and not all(_RANK in str(rank.read_stack()) for rank in asked):
        time.sleep(0.05)


@dataclass
class Supervisor:
    """Watches the ranks that OneFlow's launcher starts on this machine, one of `machines`.

    `start` starts that launcher. `announce(text)` prints what the user is waiting for before the
    first training iteration. `announce` is None for programs other than libai's training program.
    """

    start: Callable[[], subprocess.Popen[bytes]]
    ranks: list[Rank]
    announce: Callable[[str], None] | None = None
    machines: Machines = field(default_factory=Machines)
    stop_signal: int | None = None
    _is_stop_passed_on: bool = False
    _has_begun: bool = True
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _kill_at: float = float("inf")
    _rest: bytes = b""
    _has_said_stall: bool = False
    _began: float = field(default_factory=time.monotonic)
    _announced: list[str] = field(default_factory=list)

    def run(self) -> Ending:
        """Wait until all ranks have ended, on all machines, report a failure, and return the end
        of the job.
        """
        ctypes.CDLL(None).prctl(
            _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # to wait for the ranks if their launcher dies
        stop = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._stop)
        # Schedulers repeat their signals, so signals are also handled while the end is reported.
        # Leaving `launcher` closes its stderr, which a rank that is still exiting may have open.
        with signals_handled({**stop, signal.SIGTSTP: self._pause}), self.start() as self.launcher:
            try:
                self._wait()
            finally:
                self._end_all()
            ending = self.machines.settle(self._ending())
            if ending.report is not None:
                self._say(ending.report)
            elif ending.code == EXIT_FAILED:
                say("launch: another machine failed and did not report why: read its output.")
        return ending

    # ----------------------------------------------------------------------------------------------
    # signals

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Record a stop request.

        All signals request the same stop. Only a second Ctrl-C ends the job at once.
        """
        if self.stop_signal is None:
            # a program of the user's may handle SIGTERM only, which asks for the same
            is_hangup = signum == signal.SIGHUP and self.announce is None
            self.stop_signal = signal.SIGTERM if is_hangup else signum
        if self._interrupts.is_again(signum) and self._kill_at > 0:
            self._kill_at = 0.0
            say(describe_quit(self.ranks[0].state))

    def _pass_stop_on(self) -> None:
        """Ask every rank once to save and stop.

        End the ranks if the run has not begun and has nothing to save.
        """
        if self.stop_signal is None:
            return
        if not self._is_stop_passed_on:
            self._is_stop_passed_on = True
            self._has_begun = self.announce is None or all(
                rank.state.listens or rank.has_ended for rank in self.ranks
            )
            self._end_in(_stop_seconds() if self._has_begun else REPORT_SECONDS)
            if not self._has_begun:
                say(NOT_BEGUN)
            elif self.stop_signal == signal.SIGINT and self.announce is not None:
                say(STOPPING)
        for rank in self.ranks:  # a rank without a pid has only just started and is asked later
            if rank.state.pid and not rank.was_asked_to_stop and not rank.has_ended:
                rank.was_asked_to_stop = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.state.pid, self.stop_signal)

    def _pause(self, signum: int, frame: FrameType | None) -> None:
        self.machines.pause(True)
        os.killpg(self.launcher.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        # reached when the shell continues this process
        os.killpg(self.launcher.pid, signal.SIGCONT)
        self.machines.pause(False)

    # ----------------------------------------------------------------------------------------------
    # waiting

    def _wait(self) -> None:
        """Wait until no rank is running, or until the deadline for the ranks that still run."""
        ended: list[Rank] = []
        looked_at = time.monotonic()
        while len(ended) < len(self.ranks) and time.monotonic() < self._kill_at:
            self._pass_stop_on()
            self._filter_stderr(POLL_SECONDS)
            self._announce_wait()
            self._announce_stall()
            if self.machines.look(self.ranks[0].state.iteration):
                self._end_in(REPORT_SECONDS)
            is_launcher_gone = self.launcher.poll() is not None  # checked before the ranks
            before, looked_at = looked_at, time.monotonic()
            for rank in self.ranks:
                rank.end_if_hung(min(looked_at - before, WATCH_SECONDS))
                rank.note_loss(is_launcher_gone)
                if rank.has_ended and rank not in ended:
                    ended.append(rank)
                    self._note_end(rank)
        if self._is_stop_passed_on and self._has_begun and self._kill_at:
            for rank in self.ranks:
                rank.end_if_hung(float("inf"))

    def _announce_wait(self) -> None:
        """Print once what the job is waiting for, according to the phase of the first rank, if that
        takes long.
        """
        state = self.ranks[0].state
        text = WAITS.get(state.phase.decode())
        is_over = state.iteration or self.stop_signal is not None
        if self.announce is None or text is None or text in self._announced or is_over:
            return
        if time.monotonic() - self._began >= SLOW_SECONDS:
            self._announced.append(text)
            self.announce(text)

    def _announce_stall(self) -> None:
        """Print once which rank the others wait for, if no rank makes progress for a while.

        Ranks are not asked for their stacks: a signal may interrupt what native code waits for.
        """
        running = [rank for rank in self.ranks if not rank.has_ended]
        if self.announce is None or not running or not self.ranks[0].state.iteration:
            return
        seconds = min(rank.still_seconds for rank in running)
        if seconds < max(STALL_SECONDS, STALL_SHARE * self.ranks[0].state.limit):
            self._has_said_stall = False
        elif not self._has_said_stall and self.stop_signal is None:
            self._has_said_stall = True
            last = min(running, key=lambda rank: rank.position)
            is_behind = last.position < max(rank.position for rank in running)
            who = f"rank {last.number}" if is_behind else "all ranks"
            done = f"after iteration {last.state.iteration}"
            self.announce(
                f"waiting for {who} since {seconds:.0f} s, {done}, in the phase {last.phase!r}"
            )

    def _note_end(self, rank: Rank) -> None:
        if (
            rank.code == EXIT_RESUMABLE
        ):  # other ranks may still be writing their part of the checkpoint
            self._end_in(_stop_seconds())
        elif rank.has_failed:
            if rank.waited_in_vain and self._kill_at == float("inf"):
                _ask_for_stacks(self.ranks)
            self.machines.tell_failure()
            self._end_in(REPORT_SECONDS)

    def _end_in(self, seconds: float) -> None:
        """Set the deadline after which running ranks are ended. An earlier deadline is kept."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _end_all(self) -> None:
        """End all processes of the job, except those that a successful job has left running."""
        for rank in self.ranks:
            rank.was_ended = not rank.has_ended
        is_well = all(rank.code in (0, EXIT_RESUMABLE) for rank in self.ranks)
        with contextlib.suppress(ProcessLookupError):
            if is_well:
                self.launcher.kill()
            else:
                os.killpg(
                    self.launcher.pid, signal.SIGKILL
                )  # includes loader workers of ranks that could not clean up
        with contextlib.suppress(ChildProcessError):
            while not is_well:
                os.waitpid(-self.launcher.pid, 0)
        self.launcher.wait()
        for rank in self.ranks:
            rank.note_loss(is_launcher_gone=True)
        while self._filter_stderr(0.0):
            pass
        rank_notes.write_stderr(self._rest)

    def _filter_stderr(self, seconds: float) -> bool:
        """Forward what the ranks write to stderr, waiting up to `seconds` for it.

        Return False if there was nothing.
        """
        pipe = self.launcher.stderr
        if not select.select([] if pipe is None else [pipe], [], [], seconds)[0] or pipe is None:
            rank_notes.write_stderr(self._rest)  # an unfinished line, such as a progress bar
            self._rest = b""
            return False
        chunk = os.read(pipe.fileno(), 65536)
        lines, newline, self._rest = (self._rest + chunk).rpartition(b"\n")
        rank_notes.write_stderr(rank_notes.drop_harmless(lines + newline))
        if not chunk:
            pipe.close()
            self.launcher.stderr = None
        return bool(chunk)

    # ----------------------------------------------------------------------------------------------
    # the end

    def exit_code(self) -> int:
        """Return the exit code of the whole job on this machine."""
        codes = {rank.code for rank in self.ranks}
        if codes <= {0, EXIT_RESUMABLE}:
            return EXIT_RESUMABLE if EXIT_RESUMABLE in codes else 0
        failed = bool(codes & {EXIT_FAILED, EXIT_USER_MISTAKE}) and self._has_begun
        if self.stop_signal is not None and not failed:
            return 128 + self.stop_signal
        return EXIT_USER_MISTAKE if EXIT_USER_MISTAKE in codes else EXIT_FAILED

    def first_failure(self, code: int) -> Rank:
        """Return the rank that failed first in a job that ended with `code`.

        A failure that follows from another rank's failure only counts as the first one if there is
        no other, as between machines. Such a failure is an error marked as a consequence, or a
        SIGABRT without a Python report, with which oneflow ends a rank that has lost another.
        """
        failed = [
            rank
            for rank in self.ranks
            if rank.has_failed and (rank.code == code or code != EXIT_USER_MISTAKE)
        ]
        failed = [rank for rank in failed if not rank.was_ended] or failed
        first = min(failed, key=lambda rank: (_is_consequence(rank), rank.failed_at))
        # A rank that hangs may be waiting for another one, which is stuck outside oneflow or in an
        # earlier step.
        if first.state.hung_seconds and not first.note:
            return min(
                (rank for rank in self.ranks if not rank.note),
                key=lambda rank: (
                    rank.is_in_libraries,
                    rank.state.iteration,
                    rank.phase == "train",
                    rank is not first,
                ),
            )
        return first

    def failure(self) -> list[Any] | None:
        """Return the kind of error and the iteration if a restart would repeat the failure, and
        None otherwise.
        """
        notes = [rank.note for rank in self.ranks if rank.has_failed]
        return next(
            (
                [note["kind"], note["iteration"]]
                for note in notes
                if note.get("iteration") is not None
            ),
            None,
        )

    def _ending(self) -> Ending:
        """Return how the ranks of this machine ended."""
        code = self.exit_code()
        has_hung = any(rank.state.hung_seconds for rank in self.ranks)
        report = None
        if code in (EXIT_FAILED, EXIT_USER_MISTAKE) or has_hung:
            self._keep_errors()
            if not self.machines.are_several or not all(rank.was_ended for rank in self.ranks):
                report = self._first_report(code)
        written = self.ranks[0].state.written
        return Ending(code, self.stop_signal is not None, written, report)

    def _first_report(self, code: int) -> Report:
        """Return the report of the rank that failed first. Prints where other ranks waited."""
        first = self.first_failure(code)
        for rank in self.ranks if first.waited_in_vain else ():
            if rank is not first:
                say(f"launch: rank {rank.number} was {rank.where()}.")
        waits = first.waited_in_vain and first.is_in_libraries
        follows = 2 if _is_consequence(first) else int(waits)
        report = Report("", first.failed_at, code, follows, self.machines.node_rank)
        report.failure = self.failure()
        if first.note:
            said = first.note["said"]
            is_of_all = not self.machines.are_several and all(
                rank.note.get("said") == said for rank in self.ranks
            )
            is_plain = is_of_all or (code == EXIT_USER_MISTAKE and first.number == 0)
            report.said = said if is_plain else with_rank(said, first.number)
            return report
        report.output = first.read_output()
        has_others = len(self.ranks) > 1 or self.machines.are_several
        others = "; the other ranks were ended" if has_others else ""
        saved = self.ranks[0].state.saved
        advice = f" --resume continues after iteration {saved}." if saved else ""
        report.said = (
            f"launch: rank {first.number} failed first: {self._describe(first)}{others}.{advice}"
        )
        return report

    def _say(self, report: Report) -> None:
        """Print the error of the rank that failed first, or its last native output, but no other
        rank's.
        """
        say(report.output, end="")
        say_error(report.said, report.code)

    def _keep_errors(self) -> None:
        """Write the last error of every failed rank to `errors/rank_<number>.txt` in the output
        folder.
        """
        with contextlib.suppress(OSError):  # no rank has recorded its folder, or a full disk
            output_dir = Path(Path(self.ranks[0].folder, OUTPUT_DIR).read_text(encoding="utf-8"))
            if any(rank.note.get("kind") == "FolderInUseError" for rank in self.ranks):
                return  # the folder belongs to another job
            for rank in self.ranks:
                stack = "".join(f"  {frame}\n" for frame in rank.read_stack())
                text = rank.note.get("said") or stack or rank.read_output()
                if not rank.has_failed or (rank.was_ended and not text):
                    continue
                end = f"exit code {rank.code}" if rank.note else self._describe(rank)
                end = "ended by the launcher" if rank.was_ended else end
                path = output_dir / ERRORS_FOLDER / f"rank_{rank.number}.txt"
                path.parent.mkdir(exist_ok=True)
                path.write_text(f"rank {rank.number}: {end}\n\n{text}", encoding="utf-8")

    def _describe(self, rank: Rank) -> str:
        """Describe how a rank without a note ended."""
        state = rank.state
        limit = (
            rank_notes.STEP_LIMIT
            if state.iteration or self._is_stop_passed_on
            else rank_notes.START_LIMIT
        )
        if state.hung_seconds and rank.phase == "meet":
            return (
                f"it waited {state.hung_seconds:g} s for the other ranks. Are all machines "
                f"running, with the same ADDR, PORT and PROCS? {limit}=<seconds> waits longer"
            )
        hung = max(other.state.hung_seconds for other in self.ranks)
        if hung and (state.hung_seconds or rank.was_ended or _is_consequence(rank)):
            problem = (
                "it did not stop in time"
                if self._is_stop_passed_on
                else f"no progress for {hung:g} s"
            )
            return (
                f"{problem} {rank.where()}. {limit}=<seconds> waits longer, 0 waits without a limit"
            )
        if rank.is_lost:
            return "its process or oneflow.distributed.launch was killed"
        done = f" after iteration {state.iteration}" if state.iteration else ""
        if state.has_left:  # it could not write a note
            return "its error is above"
        if state.status >= 0:
            return (
                f"it left{done} with exit code {state.status} before its work was done (os._exit?)"
            )
        name = signal.Signals(-state.status).name
        if name == "SIGABRT" and self.machines.are_several:
            return (
                f"killed by {name} (oneflow does that when it loses a rank of another machine: "
                "look at its output)"
            )
        if frame := rank.frame("crash"):
            return (
                f"killed by {name} in native code, with Python at {_place(frame)}. {_NATIVE_HINT}"
            )
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}{done}"


def _stop_seconds() -> float:
    """Return the time that ranks have to save and stop."""
    return rank_notes.read_limit(rank_notes.STEP_LIMIT, rank_notes.DEFAULT_STEP_SECONDS) or float(
        "inf"
    )


def _is_consequence(rank: Rank) -> bool:
    return bool(rank.note["is_consequence"]) if rank.note else rank.state.status == -signal.SIGABRT


def _place(frame: str) -> str:
    """Turn `File "a.py", line 3 in forward` into `a.py:3: `the line``."""
    path, _, rest = frame.removeprefix('File "').partition('", line ')
    number = rest.partition(" ")[0]
    line = linecache.getline(path, int(number)).strip() if number.isdecimal() else ""
    return f"{path}:{number}: `{line}`" if line else frame
