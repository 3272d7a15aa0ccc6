"""How a process of a job ends: with the right exit code, its error said once, and never hanging the other ranks.

`guarded_main` runs a program's main function; the launcher starts every rank through `run_script`. Standard
library only. Not here: making `import oneflow` work (libai/launch/runtime.py), what ranks and launcher tell each other
while they run (libai/utils/rank_notes.py), when training stops (libai/launch/stop.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from libai.utils.atomic import explain_full_disk
from libai.utils.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER_MISTAKE, UserError
from libai.utils.rank_notes import (
    FAILURE_DIR_VARIABLE,
    LOCAL_RANKS_VARIABLE,
    begin_notes,
    dump_stacks_on_signal,
    hide_harmless_lines,
    note_leaving,
    own_folder,
    phase_name,
    read_leaving,
    world_size,
)
from libai.utils.screen import say

# For how long a rank that is ready to leave waits for the others of its machine.
LEAVE_TOGETHER_SECONDS = 10.0
#: `timeout -s INT` and some schedulers deliver one signal twice; a person needs longer to press Ctrl-C again
SAME_SIGNAL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def open_missing_streams() -> None:
    """Give a process that was started with stdin, stdout or stderr closed (`>&-`) an empty one in its place.

    Otherwise the next file that is opened takes the number, and what native code prints lands in it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) != descriptor:
                return  # a lower one was closed on purpose while the process ran
            os.set_inheritable(descriptor, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115  # for as long as it lives


def request_parent_death_signal(parent_pid: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends, so that no rank outlives its launcher.

    `parent_pid` is the expected parent: if it is gone already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def guarded_main(main: Callable[[], object]) -> NoReturn:
    """Run `main` and leave the process with an exit code; never returns and never hangs the job.

    Codes: what `main` returns or gives to `sys.exit` (None is 0); 2 for a `UserError`, whose text is printed once per
    job; 130 for Ctrl-C; 1 for anything else, with rank and traceback on stderr. `sys.exit(0)` inside of a training run
    or of what prepares one is a failure as well: the run was not over. In a job of several processes every code but 0
    leaves by `os._exit`: oneflow 0.9.0's own exit handler waits for ever for ranks that are still training. With 0
    that handler is wanted: the ranks meet in it, so that none is missed by the others.
    """
    hide_harmless_lines()
    code = run_guarded(main)
    if code == EXIT_RESUMABLE:
        _ignore_stop_signals()  # schedulers repeat theirs, and everything is saved
    if code != 0 and world_size() > 1:
        leave_at_once(code)
    note_leaving(code)
    sys.exit(code)


def run_guarded(main: Callable[[], object]) -> int:
    """Run `main`, report what it raises and return the exit code, as described at `guarded_main`."""
    try:
        return _as_exit_code(main())
    except SystemExit as stop:
        return _report_exit(stop)
    except KeyboardInterrupt as stop:
        _record_failure(stop, None)
        return 128 + signal.SIGINT
    except BaseException as error:
        return _report(error)


def _ignore_stop_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)


def leave_at_once(code: int) -> NoReturn:
    """End the process without exit handlers, but with everything written that was printed or logged.

    The code is noted first (`note_leaving`). Ranks stopped from outside leave together: oneflow 0.9.0 aborts a rank
    whose heartbeat misses another, every 7 to 13 seconds, and it may still be busy with its last lines.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it any more
            stream.flush()
    note_leaving(code)
    if code == EXIT_RESUMABLE:
        _wait_for_leaving_ranks(LEAVE_TOGETHER_SECONDS)
    os._exit(code)


def _wait_for_leaving_ranks(limit_seconds: float) -> None:
    """Return when every rank of this machine has noted that it leaves, at the latest after `limit_seconds`."""
    folder = os.environ.get(FAILURE_DIR_VARIABLE)
    num_ranks = int(os.environ.get(LOCAL_RANKS_VARIABLE, 1))
    end = time.monotonic() + limit_seconds
    while folder and len(read_leaving(folder)) < num_ranks and time.monotonic() < end:
        time.sleep(0.01)


@contextlib.contextmanager
def signals_handled(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals while the block runs; what is ignored (nohup, a script's background job) stays ignored."""
    ours = {signum: handler for signum, handler in handlers.items() if signal.getsignal(signum) is not signal.SIG_IGN}
    previous = {signum: signal.signal(signum, handler) for signum, handler in ours.items()}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


class Interrupts:
    """Tells Ctrl-C that comes again from one that is delivered twice."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_again(self, signum: int) -> bool:
        """Return True for a SIGINT later than `SAME_SIGNAL_SECONDS` after the first; to be called for each signal."""
        if signum != signal.SIGINT:
            return False
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= SAME_SIGNAL_SECONDS


def run_script(arguments: Sequence[str]) -> NoReturn:
    """Run a Python file or a module of libai as `__main__`, as one guarded rank of the launcher's job.

    `arguments`: the launcher's process id, the file's absolute path or the module's name, its arguments.
    """
    launcher_pid, file, *rest = arguments
    request_parent_death_signal(int(launcher_pid))
    dump_stacks_on_signal()
    begin_notes()
    sys.argv = [file, *rest]
    is_file = os.path.isabs(file)
    sys.path[:1] = [str(Path(file).resolve().parent)] if is_file else []

    def run_file() -> None:
        if is_file:
            runpy.run_path(file, run_name="__main__")
        else:
            runpy.run_module(file, run_name="__main__", alter_sys=True)

    guarded_main(run_file)


# ------------------------------------------------------------------------------------------------- reporting


def _as_exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    print(value, file=sys.stderr)  # as Python does for `sys.exit("text")`
    return EXIT_FAILED


def _report_exit(stop: SystemExit) -> int:
    """The exit code of a `sys.exit`; one that leaves a run with 0 is reported as the failure that it is."""
    code = _as_exit_code(stop.code)
    left = getattr(stop, "left_phase", None)
    if code == 0 and left is not None:
        text = (
            f"sys.exit(0) was called at {_place(stop)} while {phase_name(left)}: the run was not over. Stop a run "
            "early with `raise StopTraining` in a hook's after_step, or exit after train() has returned"
        )
        if not _record_failure(stop, text):
            say(f"error: rank {_rank()}: {text}." if world_size() > 1 else f"error: {text}.")
        return EXIT_FAILED
    if code not in (0, EXIT_RESUMABLE):
        _record_failure(stop, f"sys.exit({stop.code!r}) at {_place(stop)}")
    return code


def _report(error: BaseException) -> int:
    """Say what went wrong, once per job where it is a user's mistake, and return the exit code.

    Under the launcher it is the launcher that prints the error of the rank that failed first.
    """
    rank = _rank()
    is_mistake = isinstance(error, UserError)
    explains_itself = is_mistake or getattr(error, "explains_itself", False)
    text = str(error) if explains_itself else explain_full_disk(error)
    if text is None and isinstance(error, ImportError):
        from libai.launch.runtime import explain_import_error

        text = explain_import_error(error)
        is_mistake = text is not None
    if text is not None and not text.strip():
        text = type(error).__name__
    said = f"error: {text}\n" if text is not None else _traceback(error, rank)
    if not _record_failure(error, text, said):
        say(f"error: rank {rank}: {text}" if text is not None and rank > 0 else said.removesuffix("\n"))
    elif rank > 0 and text is None:
        sys.stderr.write(said)  # its own file
    return getattr(error, "exit_code", EXIT_USER_MISTAKE) if is_mistake else EXIT_FAILED


def _traceback(error: BaseException, rank: int) -> str:
    where = f"rank {rank} failed:\n" if world_size() > 1 else ""
    return where + "".join(traceback.format_exception(type(error), error, _own_frames(error)))


def _rank() -> int:
    return max(0, int(os.environ.get("RANK", 0)))  # importing oneflow without a launcher sets RANK=-1


def _record_failure(error: BaseException, text: str | None, said: str | None = None) -> bool:
    """Leave a note for the launcher, which tells the user which rank failed first. False when nobody asks for it.

    `text`: what explains the error, None for one that its traceback explains. `said`: what to print for it.
    """
    own = own_folder()
    if own is None:
        return False
    path = own[0] / f"rank_{own[1]}.json"
    if path.exists():  # by the `guarded_main` inside of this one
        return True
    note = {
        "rank": own[1],
        "time": time.time(),
        "reason": text or _describe(error),
        "where": _place(error),
        "kind": type(error).__name__,
        "said": said,
        "phase": getattr(error, "left_phase", None),
        "iteration": getattr(error, "iteration", None),
        "is_consequence": bool(getattr(error, "is_consequence", False)),
    }
    try:
        path.write_text(json.dumps(note), encoding="utf-8")
    except OSError:
        return False  # the report on stderr must come out whatever the disk does
    return True


def _describe(error: BaseException) -> str:
    text = traceback.format_exception_only(type(error), error)[-1].strip()
    return f"{text}: no memory was left" if text == "MemoryError" else text


def _place(error: BaseException) -> str:
    """File and line of the innermost frame that tells something: argparse's and oneflow's own `sys.exit` do not."""
    silent = ("argparse.py", "oneflow/__init__.py")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith(silent)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the leading frames of this file and runpy, which tell a user nothing."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        if frame.tb_frame.f_code.co_filename not in {__file__, runpy.__file__}:
            break
        frame = frame.tb_next
    return frame
