"""Facts that a rank and its watchers tell each other: a few numbers in a file that all of them map into memory.

The launcher makes a folder with one such file for each of its ranks. Writing a number there costs no system call and
needs no room on a disk. Standard library only. Not here: the watching itself (libai/launch/rank.py,
libai/launch/supervisor.py) and what a rank failed with (libai/launch/guard.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from libai.utils.errors import UserError

#: set by the launcher: the folder of the notes, and the number of ranks on this machine
NOTES_VARIABLE = "LIBAI_NOTES"
LOCAL_RANKS_VARIABLE = "LIBAI_LOCAL_RANKS"
#: the file in that folder to which rank 0 writes the run's output folder
OUTPUT_DIR = "output_dir"
#: seconds since 1970 when the launcher began: the time of `${now:...}` on every rank, also when started again
START_VARIABLE = "LIBAI_START_TIME"
#: what makes a process a rank: with these, `import oneflow` waits for the other ranks of the job
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")

#: the longest time without progress: before the first iteration, where the ranks meet, and from then on
START_LIMIT, STEP_LIMIT = "LIBAI_START_TIMEOUT", "LIBAI_STEP_TIMEOUT"
DEFAULT_START_SECONDS = DEFAULT_STEP_SECONDS = 1800.0
DEFAULT_MEETING_SECONDS = 120.0

#: what oneflow 0.9.0 writes to stderr and tells a user nothing, such as on a machine without InfiniBand or a GPU
HARMLESS = (
    b"libibverbs not available",
    b"CUDA driver version is insufficient",
    b"Failed to get cuda runtime version",
    b"io_event_poller.cpp",  # a rank whose peer has gone
    b"*** Check failure stack trace: ***",
    b"    @     0x",
)


def drop_harmless(text: bytes) -> bytes:
    """`text` without the lines that mean nothing, whole lines only."""
    return b"".join(line for line in text.splitlines(keepends=True) if not any(h in line for h in HARMLESS))


def world_size() -> int:
    """Number of ranks of the job that this process belongs to, as its launcher says."""
    return int(os.environ.get("WORLD_SIZE", 1))


def environment_of_no_rank() -> dict[str, str]:
    """This process's environment for one that has no place in its job."""
    return {name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES}


def read_limit(name: str, default: float) -> float:
    """The seconds of START_LIMIT or STEP_LIMIT, 0 without limit; `UserError` for anything but a number of seconds."""
    text = os.environ.get(name) or str(default)
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise UserError(f"{name} is {text!r}; it must be a number of seconds, or 0 to wait without limit.")


# ------------------------------------------------------------------------------------------------ the numbers


class RankState(ctypes.Structure):
    """The state of a rank. The first group is written by the rank, the second by the process that watches it."""

    _fields_ = (
        ("pid", ctypes.c_int64),  # 0 until it can be asked for its stacks
        ("beats", ctypes.c_int64),  # counts whatever shows that it gets on
        ("limit", ctypes.c_double),  # seconds between two beats after which it hangs; 0: it may do what it likes
        ("iteration", ctypes.c_int64),  # completed
        ("phase", ctypes.c_char * 16),  # the one that it is in
        ("listens", ctypes.c_int64),  # a signal lets it save and stop
        ("has_left", ctypes.c_int64),  # its work is over, with this exit code
        ("code", ctypes.c_int64),
        ("ended_at", ctypes.c_double),  # 0 while it runs
        ("status", ctypes.c_int64),  # exit code, or minus the signal that ended it
        ("hung_seconds", ctypes.c_double),  # it was ended because it had no beat for that long
    )


def make_state(folder: str, rank: int) -> RankState:
    """The numbers of a rank that is to be started."""
    Path(folder, f"state_{rank}").write_bytes(bytes(RankState()))
    return open_state(folder, rank)


def open_state(folder: str, rank: int) -> RankState:
    """The numbers of a rank of this machine's job."""
    with open(Path(folder, f"state_{rank}"), "r+b") as file:
        return RankState.from_buffer(mmap.mmap(file.fileno(), 0))


class _Own:
    """This process's numbers, nobody else's without the launcher; its phases, from the outermost to the present one."""

    folder: str | None = None
    state = RankState()
    phases: tuple[str, ...] = ()
    #: the limit outside of phases: a program of the user's own has none there
    limit = 0.0


def begin_rank(state: RankState, is_training: bool) -> None:
    """Make this process the rank whose numbers these are."""
    _Own.folder, _Own.state = os.environ[NOTES_VARIABLE], state
    state.limit = _Own.limit = read_limit(START_LIMIT, DEFAULT_START_SECONDS) if is_training else 0.0
    state.pid = os.getpid()


def own_folder() -> Path | None:
    """The notes folder of the launcher that has started this process as a rank; None when nobody has."""
    is_rank = _Own.folder is not None and _Own.state.pid == os.getpid()
    return Path(str(_Own.folder)) if is_rank else None


def own_state() -> RankState:
    """This process's numbers."""
    return _Own.state


# ------------------------------------------------------------------------------------------------ progress


@contextlib.contextmanager
def phase(name: str, start_seconds: float = DEFAULT_START_SECONDS) -> Iterator[None]:
    """Say what this process is at while the block runs ("build", "compile", "save" …); also a decorator.

    In a phase a rank must get on: `note_progress` within LIBAI_START_TIMEOUT seconds (or `start_seconds`), and after
    the first iteration within LIBAI_STEP_TIMEOUT. An exception keeps the innermost phase that it left as `left_phase`.
    """
    before, limit = _Own.phases, _Own.state.limit
    _set_phases((*before, name))
    if not _Own.state.iteration:
        _Own.state.limit = read_limit(START_LIMIT, start_seconds)
    elif not before:
        _Own.state.limit = read_limit(STEP_LIMIT, DEFAULT_STEP_SECONDS)
    try:
        yield
    except BaseException as error:
        if not hasattr(error, "left_phase"):
            with contextlib.suppress(AttributeError):
                error.left_phase = name  # type: ignore[attr-defined]
        raise
    finally:
        _set_phases(before)
        if not before:
            _Own.state.limit = _Own.limit
        elif not _Own.state.iteration:
            _Own.state.limit = limit


def _set_phases(names: tuple[str, ...]) -> None:
    _Own.phases = names
    _Own.state.phase = names[-1].encode() if names else b""


def note_progress(iteration: int | None = None) -> None:
    """Report that work continues, such as reading a large corpus; costs nothing worth mentioning.

    `iteration`: how many are completed, from the training loop.
    """
    state = _Own.state
    state.beats += 1
    if iteration is None:
        return
    if not state.iteration and _Own.phases:
        state.limit = read_limit(STEP_LIMIT, DEFAULT_STEP_SECONDS)
    state.iteration = iteration


def own_progress() -> tuple[str, int]:
    """The phase of this process, and the iterations completed, as the host knows it: nothing waits for the device."""
    return (_Own.phases or ("",))[-1], _Own.state.iteration


# -------------------------------------------------------------------------------------------------- stderr


class _Hiding:
    is_on = False


def hide_harmless_lines() -> None:
    """Let `without_harmless_lines` act in this process, which no launcher has started."""
    _Hiding.is_on = True


@contextlib.contextmanager
def without_harmless_lines() -> Iterator[None]:
    """Leave the lines that mean nothing out of what the block writes to stderr, in commands and notebooks.

    A rank's stderr is read by its launcher, which leaves them out. Where native code ends a rank, its last words count
    more, so that the ranks of other launchers keep all lines.
    """
    if world_size() > 1 or own_folder() is not None or not (_Hiding.is_on or "ipykernel" in sys.modules):
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
            os.write(2, drop_harmless(file.read()))
