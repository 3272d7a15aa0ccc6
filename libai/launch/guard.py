"""End a process of a job with the right exit code and a single error report, and leave no other
rank hanging.

`guarded_main` runs a program's main function. Uses only the standard library. Other files make
`import oneflow` work (libai/launch/runtime.py), start the processes of a rank
(libai/launch/rank.py) and decide when training stops (libai/launch/stop.py).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import NoReturn

from libai.launch.requirements import explain_import_error
from libai.utils.atomic import FULL, explain_os_error
from libai.utils.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER_MISTAKE, UserError
from libai.utils.installation import LIBRARIES
from libai.utils.rank_notes import (
    RankState,
    hide_harmless_lines,
    local_states,
    note_progress,
    own_folder,
    own_state,
    world_size,
)
from libai.utils.screen import say, say_error

#: `timeout -s INT` and some schedulers deliver one signal twice; a person takes longer to press
#: Ctrl-C again
SAME_SIGNAL_SECONDS = 0.5
#: messages on the terminal after Ctrl-C; ranks agree only about once a second, so "this iteration"
#: may be a later one
STOPPING = "Stopping after this iteration; press Ctrl-C again to quit without saving."
NOT_BEGUN = "Stopping before the first iteration; there is nothing to save."
#: flag that shows all frames of a traceback; without it, only frames in the user's files are shown
TRACEBACK_FLAG = "--traceback"
#: variable with the same effect as the flag; ranks of the user's own program get it instead of the
#: flag
TRACEBACK_VARIABLE = "LIBAI_TRACEBACK"
#: path fragments of code that is not the user's, least interesting first
NOT_USERS = (
    LIBRARIES[0],
    "<frozen ",
    f"{sys.base_prefix}/lib/",
    LIBRARIES[1],
    "/site-packages/",
    "/tools/train_net.py",
)
#: module and name of the function that oneflow registers with `atexit`
_ONEFLOW_AT_EXIT = ("oneflow", "atexit_hook")


def open_missing_streams() -> None:
    """Open stdin, stdout or stderr on /dev/null if the process was started with it closed (`>&-`).

    Otherwise the next opened file gets its descriptor, and native code prints into that file.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) != descriptor:
                return  # a lower descriptor was closed on purpose while the process ran
            os.set_inheritable(descriptor, True)
            if getattr(sys, name) is None:
                # stays open as long as the process runs
                setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def guarded_main(main: Callable[[], object]) -> NoReturn:
    """Run `main` and exit with its code. Never returns and never hangs the job.

    The exit code is the value that `main` returns or passes to `sys.exit` (None is 0). It is 2 for
    a `UserError`, which is printed once per job, and 130 for Ctrl-C. It is 1 for anything else,
    with rank and traceback on stderr. `sys.exit(0)` during a run or its preparation is a failure
    too, because the run was not over. The process runs the user's own exit functions and then calls
    `os._exit`, because oneflow 0.9.0's exit functions wait endlessly for ranks that are still
    training.
    """
    hide_harmless_lines()
    code = run_guarded(main)
    is_over = code in (0, EXIT_RESUMABLE)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if code == EXIT_RESUMABLE else ():
        # everything is saved, and schedulers repeat their signals
        signal.signal(signum, signal.SIG_IGN)
    if is_over or world_size() == 1:
        try:
            _run_exit_functions()
        except BaseException:  # the exit code is that of `main`, whatever fails on the way out
            traceback.print_exc()
    if is_over and own_folder() is not None:
        _leave_together(code)
    leave_at_once(code)


def _run_exit_functions() -> None:
    """Run the exit functions as Python does, except oneflow's, which may abort, crash or never
    return.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    # oneflow keeps no reference to its function by name
    candidates = gc.get_objects() if "oneflow" in sys.modules else []
    for candidate in candidates:
        # not `isinstance`, which asks a proxy for its class: a dead one raises ReferenceError
        if type(candidate) is not FunctionType:
            continue
        if (candidate.__module__, candidate.__name__) == _ONEFLOW_AT_EXIT:
            atexit.unregister(candidate)
    with contextlib.suppress(Exception):  # Python has already printed it
        atexit._run_exitfuncs()


def _leave_together(code: int) -> None:
    """Record that this rank's work is done, and wait for the other ranks of this machine.

    Without this wait, the heartbeat of oneflow 0.9.0, which runs every 7 to 13 seconds, would abort
    ranks that are still working because another rank is gone.
    """
    note_leaving(code)
    states = local_states().values()
    while not all(state.has_left or state.ended_at for state in states):
        note_progress()
        time.sleep(0.01)


def note_leaving(code: int) -> None:
    """Record for the launcher that this rank's work is over.

    A rank that ends without this record counts as failed.
    """
    state = own_state()
    state.code, state.has_left = code, 1


def run_guarded(main: Callable[[], object]) -> int:
    """Run `main`, report any exception and return the exit code, as `guarded_main` describes."""
    try:
        return _as_exit_code(main())
    except SystemExit as stop:
        return _report_exit(stop)
    except KeyboardInterrupt as stop:
        _record_failure(stop, "error: KeyboardInterrupt")
        return 128 + signal.SIGINT
    except BaseException as error:  # any exception is reported and ends the process with its code
        return _report(error)


def leave_at_once(code: int) -> NoReturn:
    """Flush everything that was printed or logged, and end the process without running exit
    functions.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream may be closed
            stream.flush()
    if own_folder() is not None:
        note_leaving(code)
    os._exit(code)


@contextlib.contextmanager
def signals_handled(
    handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]],
) -> Iterator[None]:
    """Handle signals while the block runs.

    Ignored signals (nohup, a script's background job) stay ignored.
    """
    ours = {
        signum: handler
        for signum, handler in handlers.items()
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    previous = {signum: signal.signal(signum, handler) for signum, handler in ours.items()}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def describe_quit(state: RankState) -> str:
    """Return the message after a second Ctrl-C, with the number of iterations since the rank's last
    checkpoint.
    """
    lost = max(state.iteration - state.saved, 0)
    return (
        f"Quit without saving. Iterations lost: {lost}."
        if state.iteration
        else "Quit without saving."
    )


class Interrupts:
    """Distinguish a second Ctrl-C from one that is delivered twice."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_again(self, signum: int) -> bool:
        """Return True for a SIGINT at least `SAME_SIGNAL_SECONDS` after the first.

        Call it for every signal.
        """
        if signum != signal.SIGINT:
            return False
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= SAME_SIGNAL_SECONDS


# ----------------------------------------------------------------------------------------------
# reporting


def _as_exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    print(value, file=sys.stderr)  # as Python does for `sys.exit("text")`
    return EXIT_FAILED


def _report_exit(stop: SystemExit) -> int:
    """Return the exit code of a `sys.exit`.

    Calling `sys.exit(0)` during a run is reported as a failure.
    """
    code = _as_exit_code(stop.code)
    left = getattr(stop, "left_phase", None)
    if code == 0 and left is not None:
        said = (
            f"error: sys.exit(0) was called at {_place(stop)} in the phase {left!r}: the run was "
            "not over. Stop a run early with `raise StopTraining` in a hook's after_step, or exit "
            "after train() has returned."
        )
        if not _record_failure(stop, said):
            say(with_rank(said, _rank()) if world_size() > 1 else said)
        return EXIT_FAILED
    if code not in (0, EXIT_RESUMABLE):
        _record_failure(stop, f"error: sys.exit({stop.code!r}) at {_place(stop)}")
    return code


def _report(error: BaseException) -> int:
    """Report an error in one block of text and return the exit code.

    If a launcher started this rank, the launcher prints the error of the rank that failed first.
    """
    rank = _rank()
    text, code = None, EXIT_FAILED
    shown = _shown(traceback.extract_tb(error.__traceback__))
    if isinstance(error, UserError) or getattr(error, "explains_itself", False):
        text = str(error).strip() or type(error).__name__
        code = getattr(error, "exit_code", EXIT_FAILED)
    else:
        if isinstance(error, OSError):
            text = explain_os_error(error, bool(shown))
        elif isinstance(error, ImportError) or not shown:
            text = explain_import_error(error)
        # a restart of the ranks may find the disk or the memory again
        if text is not None and own_folder() is None and getattr(error, "errno", None) not in FULL:
            code = EXIT_USER_MISTAKE
    # a file name that is not valid UTF-8 cannot be written to a log unchanged
    said = f"error: {text or _traceback(error)}".encode(errors="backslashreplace").decode()
    if not _record_failure(error, said):
        say_error(
            with_rank(said, rank) if rank > 0 or (text is None and world_size() > 1) else said, code
        )
    elif rank > 0:
        print(said, file=sys.stderr)  # goes to the rank's own file
    log = logging.getLogger("libai")
    if log.handlers:
        log.error("%s", said.removeprefix("error: "), extra={"screen": ""})
    return code


def with_rank(said: str, rank: int) -> str:
    """Return the message with its rank: `error: rank 1: …`."""
    return said.replace("error: ", f"error: rank {rank}: ", 1)


def _traceback(error: BaseException) -> str:
    """Return the iteration and phase of the failure, and the traceback.

    The traceback shows only the frames in the user's files if there are any.
    """
    found = traceback.TracebackException.from_exception(error)
    parts = [found]
    while part := parts[-1].__cause__ or parts[-1].__context__:
        parts.append(part)
    frames = [frame for part in parts for frame in part.stack]
    users = _shown(frames)
    is_shortened = 0 < len(users) < len(frames)
    for part in parts if is_shortened else ():
        part.stack[:] = _shown(part.stack)
    iteration, phase = getattr(error, "left_iteration", None), getattr(error, "left_phase", None)
    where = "" if iteration is None else f" in iteration {iteration}"
    if phase not in (None, "train"):
        where += f" in the phase {phase!r}"
    hint = f" ({TRACEBACK_FLAG} shows all frames)" if is_shortened else ""
    return f"failed{where}{hint}:\n" + "".join(found.format()).rstrip("\n")


def _shown(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames in the user's files, or all frames with --traceback."""
    if TRACEBACK_FLAG in sys.argv or TRACEBACK_VARIABLE in os.environ:
        return frames
    return [frame for frame in frames if not any(path in frame.filename for path in NOT_USERS)]


def _rank() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0  # `import oneflow` sets RANK=-1 without a launcher


def _record_failure(error: BaseException, said: str) -> bool:
    """Write a note for the launcher, which prints `said` of the rank that failed first.

    Returns False if there is no launcher or the note cannot be written.
    """
    folder = own_folder()
    if folder is None:
        return False
    note = {
        "time": time.time(),
        "kind": type(error).__name__,
        "said": said,
        "phase": getattr(error, "left_phase", None),
        "iteration": getattr(error, "iteration", None),
        "is_consequence": bool(getattr(error, "is_consequence", False)),
    }
    try:
        Path(folder, f"note_{_rank()}.json").write_text(json.dumps(note), encoding="utf-8")
    except OSError:
        return False  # the caller then reports on stderr
    return True


def _place(error: BaseException) -> str:
    """Return file and line of the innermost frame, without the frames of argparse and oneflow that
    call `sys.exit`.
    """
    silent = (f"{os.path.dirname(os.__file__)}/argparse.py", f"{LIBRARIES[0]}__init__.py")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in silent
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
