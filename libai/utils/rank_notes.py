"""Share the state of a rank with the processes that watch it, as a few numbers in a memory-mapped
file.

The launcher creates a folder with one such file per rank. Writing a number needs neither a system
call nor disk space. Uses only the standard library. libai/launch/rank.py and
libai/launch/supervisor.py watch the ranks, and libai/launch/guard.py records their errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from libai.utils.errors import UserError

#: variables set by the launcher: the folder of the notes, and the number of ranks on this machine
NOTES_VARIABLE = "LIBAI_NOTES"
LOCAL_RANKS_VARIABLE = "LIBAI_LOCAL_RANKS"
#: name of the file in that folder to which rank 0 writes the run's output folder
OUTPUT_DIR = "output_dir"
#: start time of the launcher in seconds since 1970, used for `${now:...}` on every rank, also after
#: a restart
START_VARIABLE = "LIBAI_START_TIME"
#: variables that make a process a rank: with them, `import oneflow` waits for the other ranks of
#: the job
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")

#: variables and defaults in seconds for the longest time without progress: before and after the
#: first iteration, and during the rendezvous
START_LIMIT, STEP_LIMIT = "LIBAI_START_TIMEOUT", "LIBAI_STEP_TIMEOUT"
DEFAULT_START_SECONDS = DEFAULT_STEP_SECONDS = 1800.0
DEFAULT_MEETING_SECONDS = 120.0
#: number of measured steps after which the default limit of a phase follows them, the factor of the
#: slowest step, and the smallest limit in seconds
_ENOUGH_STEPS, _TIMES_SLOWEST, _LEAST_SECONDS = 5, 20.0, 100.0
_POLL_SECONDS = 0.02

#: parts of lines that oneflow 0.9.0 writes to stderr and that do not help users, such as those
#: about a missing GPU
HARMLESS = (
    b"libibverbs not available",
    b"CUDA driver version is insufficient",
    b"Failed to get cuda runtime version",
    b"io_event_poller.cpp",  # written by a rank after another one has exited
    b"*** Check failure stack trace: ***",
    b"    @     0x",
)


def drop_harmless(text: bytes) -> bytes:
    """Return `text` without harmless lines."""
    return b"".join(
        line for line in text.splitlines(keepends=True) if not any(h in line for h in HARMLESS)
    )


def world_size() -> int:
    """Return the number of ranks of the job, as set by the launcher, or 1 without a launcher.

    Never raises an error: `libai.utils.distributed` reports a variable that is not a number.
    """
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get(LOCAL_RANKS_VARIABLE) or world_size())


def environment_of_no_rank() -> dict[str, str]:
    """Return the environment for a subprocess that is not a rank of this job."""
    return {name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES}


def read_limit(name: str, default: float) -> float:
    """Return the seconds of START_LIMIT or STEP_LIMIT. 0 means no limit.

    Raises `UserError` for an invalid number.
    """
    text = os.environ.get(name) or str(default)
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise UserError(
        f"{name} is {text!r}; it must be a number of seconds, or 0 to wait without limit."
    )


# ----------------------------------------------------------------------------------------------
# the numbers


class RankState(ctypes.Structure):
    """State of a rank.

    The rank writes the fields up to `code`, and the process that watches it writes the others.
    """

    _fields_ = (
        ("pid", ctypes.c_int64),  # 0 until the rank can be asked for its stacks
        ("parent", ctypes.c_int64),  # process that records how the rank ends
        ("beats", ctypes.c_int64),  # counts signs of progress
        (
            "limit",
            ctypes.c_double,
        ),  # seconds without a beat after which it counts as hung; 0: no limit
        ("iteration", ctypes.c_int64),  # number of completed iterations
        ("saved", ctypes.c_int64),  # number of iterations in its newest checkpoint
        ("written", ctypes.c_int64),  # the same, but 0 until this job has written a checkpoint
        ("begun", ctypes.c_int64),  # number of updates that it has begun
        ("stopped", ctypes.c_int64),  # 1 + `begun` if a hook has stopped it, else 0
        ("collectives", ctypes.c_int64),  # number of collective operations that it has begun
        ("evaluations", ctypes.c_int64),  # number of evaluations that it has begun
        ("compiled", ctypes.c_int64),  # `begun` when it last began to compile again
        ("phase", ctypes.c_char * 160),  # current phase
        ("output_start", ctypes.c_int64),  # position in its output file at which this job begins
        ("listens", ctypes.c_int64),  # 1 if it saves and stops on a signal
        ("has_left", ctypes.c_int64),  # 1 if its work is over, with the exit code `code`
        ("code", ctypes.c_int64),
        ("ended_at", ctypes.c_double),  # time in seconds since 1970; 0 while it runs
        ("status", ctypes.c_int64),  # exit code, or minus the signal that ended it
        ("hung_seconds", ctypes.c_double),  # if it was ended because it hung: the limit in seconds
    )


def make_state(folder: str, rank: int) -> RankState:
    """Create and return the state of a rank that is about to start."""
    Path(folder, f"state_{rank}").write_bytes(bytes(RankState()))
    return open_state(folder, rank)


def open_state(folder: str, rank: int) -> RankState:
    """Return the shared state of a rank on this machine."""
    with open(Path(folder, f"state_{rank}"), "r+b") as file:
        return RankState.from_buffer(mmap.mmap(file.fileno(), 0))


class _Own:
    """State and phases of this process.

    Without the launcher, the state is not shared. The current phase is last.
    """

    folder: str | None = None
    state = RankState()
    phases: tuple[str, ...] = ()
    #: time limit in seconds outside phases; 0 (no limit) for the user's own program
    limit = 0.0
    #: phase → number of measured steps after the first iteration, and seconds of the slowest
    steps: dict[str, tuple[int, float]] = {}
    noted_at = 0.0


def begin_rank(state: RankState, is_training: bool) -> None:
    """Make this process the rank that `state` describes."""
    _Own.folder, _Own.state = os.environ[NOTES_VARIABLE], state
    state.limit = _Own.limit = (
        read_limit(START_LIMIT, DEFAULT_START_SECONDS) if is_training else 0.0
    )
    state.phase = b"import"
    state.pid = os.getpid()


def own_folder() -> Path | None:
    """Return the launcher's folder of notes, or None if no launcher started this process as a
    rank.
    """
    if _Own.folder is None or _Own.state.pid != os.getpid():
        return None
    return Path(_Own.folder)


def local_states() -> dict[int, RankState]:
    """Return the states of the ranks of this machine by rank; empty without the launcher."""
    folder = own_folder()
    if folder is None:
        return {}
    ranks = [int(path.name.partition("_")[2]) for path in folder.glob("state_*")]
    return {rank: open_state(str(folder), rank) for rank in ranks}


def own_state() -> RankState:
    """Return the state of this process."""
    return _Own.state


# ----------------------------------------------------------------------------------------------
# progress


@contextlib.contextmanager
def phase(name: str, start_seconds: float = DEFAULT_START_SECONDS) -> Iterator[None]:
    """Set the phase of this process ("build", "compile", "save" …) while the block runs.

    Also works as a decorator.

    In a phase, a rank must make progress. It must call `note_progress` within LIBAI_START_TIMEOUT
    seconds (default `start_seconds`) before the first iteration, and within LIBAI_STEP_TIMEOUT
    seconds after it (default: `_step_limit`). An exception gets the innermost phase that it left as
    `left_phase`.
    """
    before, limit = _Own.phases, _Own.state.limit
    _measure_step()
    _set_phases((*before, name))
    if not _Own.state.iteration:
        _Own.state.limit = read_limit(START_LIMIT, start_seconds)
    else:
        _Own.state.limit = _step_limit()
    try:
        yield
    except BaseException as error:
        if not hasattr(error, "left_phase"):
            with contextlib.suppress(AttributeError):
                error.left_phase = name  # type: ignore[attr-defined]
        raise
    finally:
        _measure_step()
        _set_phases(before)
        if not before:
            _Own.state.limit = _Own.limit
        elif not _Own.state.iteration:
            _Own.state.limit = limit
        else:
            _Own.state.limit = _step_limit()


def _set_phases(names: tuple[str, ...]) -> None:
    _Own.phases = names
    _Own.state.phase = names[-1].encode()[:159] if names else b""


def _measure_step() -> bool:
    """Measure the time since the last sign of progress in the current phase.

    Returns whether the limit of that phase has changed.
    """
    seconds, _Own.noted_at = time.monotonic() - _Own.noted_at, time.monotonic()
    if not (_Own.state.iteration and _Own.phases):
        return False
    number, slowest = _Own.steps.get(_Own.phases[-1], (0, 0.0))
    _Own.steps[_Own.phases[-1]] = number + 1, max(slowest, seconds)
    return seconds > slowest or number < _ENOUGH_STEPS


def _step_limit() -> float:
    """Return the seconds without progress that the current phase may take after the first
    iteration.

    Once a few of its steps have been measured, the default follows the slowest of them, so that a
    rank that waits in vain is noticed within minutes.
    """
    number, slowest = _Own.steps.get(_Own.phases[-1], (0, 0.0)) if _Own.phases else (0, 0.0)
    default = DEFAULT_STEP_SECONDS
    if number >= _ENOUGH_STEPS:
        default = max(_LEAST_SECONDS, _TIMES_SLOWEST * slowest)
    return read_limit(STEP_LIMIT, default)


def note_progress(iteration: int | None = None) -> None:
    """Report that work continues, for example while reading a large corpus. The cost is negligible.

    `iteration` is the number of completed iterations. The training loop passes it.
    """
    state = _Own.state
    state.beats += 1
    has_changed = _measure_step()
    if iteration is not None:
        has_changed |= not state.iteration and bool(_Own.phases)
        state.iteration = iteration
    if has_changed:
        state.limit = _step_limit()


def ranks_ahead(count: str, value: int) -> list[int]:
    """Set the field `count` of this rank's state to `value`, and wait until each rank of this
    machine has as much, or begins an update or a collective operation without this rank.
    Return those that do the latter.

    Returns an empty list without the launcher. Uses no collective operation, because the ranks may
    be at different points.
    """
    own = _Own.state
    states = local_states()
    setattr(own, count, value)
    while states:
        states = {rank: state for rank, state in states.items() if getattr(state, count) < value}
        ahead = [
            rank
            for rank, state in states.items()
            if state.begun > own.begun or state.collectives > own.collectives
        ]
        if ahead:
            return ahead
        time.sleep(_POLL_SECONDS)
    return []


def own_progress() -> tuple[str, int]:
    """Return the phase of this process and the number of completed iterations, without waiting for
    the device.
    """
    return (_Own.phases or ("",))[-1], _Own.state.iteration


# ----------------------------------------------------------------------------------------------
# stderr


def write_stderr(text: bytes) -> None:
    """Write to the file descriptor of stderr.

    Does nothing if it is closed or full, or if nobody reads it.
    """
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(2, text) :]


class _Hiding:
    is_on = False


def hide_harmless_lines() -> None:
    """Enable `without_harmless_lines` in this process.

    It has no effect in a process started by a launcher.
    """
    _Hiding.is_on = True


@contextlib.contextmanager
def without_harmless_lines() -> Iterator[None]:
    """Remove harmless lines from the stderr of the block, in commands and notebooks.

    libai's launcher removes them from the stderr of its ranks. Ranks of other launchers keep all
    lines, because their last output matters if native code ends them.
    """
    if (
        world_size() > 1
        or own_folder() is not None
        or not (_Hiding.is_on or "ipykernel" in sys.modules)
    ):
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.memfd_create("stderr"), "r+b") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            write_stderr(drop_harmless(file.read()))
