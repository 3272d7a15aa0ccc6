"""What a rank and the launcher of its machine tell each other, through small files in a folder that the launcher makes.

Ranks note how they leave and how far they are, and can be asked for their Python stacks, also while they wait inside
oneflow. Standard library only. Not here: what a rank failed with (libai.runtime), and who reads all this
(tools/launch_ranks.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: set by tools/launch.py: the folder of the notes, and the number of ranks on this machine
FAILURE_DIR_VARIABLE = "LIBAI_FAILURE_DIR"
LOCAL_RANKS_VARIABLE = "LIBAI_LOCAL_RANKS"

#: asks a rank for its stacks; a real-time signal, because users and schedulers have their own plans with SIGUSR1 and 2
STACK_SIGNAL = signal.SIGRTMIN + 3
#: seconds between two looks of a rank at its own progress
SAMPLE_SECONDS = 0.5

#: what oneflow 0.9.0 writes to stderr on a machine without InfiniBand or a GPU
HARMLESS = (
    "libibverbs not available",
    "CUDA driver version is insufficient",
    "Failed to get cuda runtime version",
)


def drop_harmless(text: str) -> str:
    """`text` without the lines that mean nothing, whole lines only."""
    return "".join(line for line in text.splitlines(keepends=True) if not any(h in line for h in HARMLESS))


def own_folder() -> tuple[Path, int] | None:
    """The notes folder and this process's rank; None when it is no rank of tools/launch.py."""
    folder, rank = os.environ.get(FAILURE_DIR_VARIABLE), int(os.environ.get("RANK", -1))
    return (Path(folder), rank) if folder and rank >= 0 else None


# ------------------------------------------------------------------------------------------------- leaving


def note_leaving(code: int) -> None:
    """Tell the launcher that this rank's work is done, with this exit code, whatever oneflow does to it from now on."""
    own = own_folder()
    if own is not None:
        with contextlib.suppress(OSError):  # the exit code itself must come out whatever the disk does
            Path(own[0], f"leaving_{own[1]}").write_text(str(code), encoding="utf-8")


def read_leaving(folder: str | os.PathLike[str]) -> dict[int, int]:
    """The exit codes that ranks have noted in `folder`, by rank. A note cut short by a kill is left out."""
    codes = {}
    for path in Path(folder).glob("leaving_*"):
        with contextlib.suppress(ValueError, OSError):
            codes[int(path.name.removeprefix("leaving_"))] = int(path.read_text(encoding="utf-8"))
    return codes


# ------------------------------------------------------------------------------------------------ progress


@dataclass(frozen=True)
class Progress:
    """How far a rank was: iterations completed, batches evaluated, and whether it is at work (or between two runs)."""

    iteration: int
    evaluated: int
    is_working: bool


@contextlib.contextmanager
def report_progress(count: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Tell the launcher how far this rank is while the block runs.

    `count() -> (iterations completed, batches evaluated)` is called from a thread, twice a second: the loop pays
    nothing. Does nothing in a process that is no rank of the launcher.
    """
    own = own_folder()
    if own is None:
        yield
        return
    path = Path(own[0], f"progress_{own[1]}")
    is_over = threading.Event()

    def write(is_working: bool) -> None:
        iteration, evaluated = count()
        with contextlib.suppress(OSError):
            path.write_text(f"{iteration} {evaluated} {int(is_working)} .", encoding="utf-8")

    def sample() -> None:
        written = None
        while not is_over.is_set():
            now = count()
            if now != written:
                write(is_working=True)
                written = now
            is_over.wait(SAMPLE_SECONDS)

    thread = threading.Thread(target=sample, name="libai-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        write(is_working=False)


def read_progress(folder: str | os.PathLike[str]) -> dict[int, Progress]:
    """What ranks have reported in `folder`, by rank. A report that is being written is left out."""
    found = {}
    for path in Path(folder).glob("progress_*"):
        with contextlib.suppress(ValueError, OSError):
            iteration, evaluated, is_working, end = path.read_text(encoding="utf-8").split()
            if end == ".":
                number = int(path.name.removeprefix("progress_"))
                found[number] = Progress(int(iteration), int(evaluated), is_working == "1")
    return found


# -------------------------------------------------------------------------------------------------- stacks


def dump_stacks_on_signal() -> None:
    """Let `STACK_SIGNAL` write the Python stacks of this rank into the notes folder; also while it waits in C++."""
    own = own_folder()
    if own is not None:
        file = open(Path(own[0], f"stack_{own[1]}"), "w")  # noqa: SIM115  # open for as long as the process lives
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


def read_stack(folder: str | os.PathLike[str], rank: int) -> list[str]:
    """The frames of a rank's main thread, innermost first, as `faulthandler` writes them. Empty when it gave none."""
    with contextlib.suppress(OSError):
        text = Path(folder, f"stack_{rank}").read_text(encoding="utf-8", errors="replace")
        main_thread = text.strip().split("\n\n")[-1]  # faulthandler writes the newest thread first
        return [line.strip() for line in main_thread.splitlines() if line.strip().startswith("File ")]
    return []


# -------------------------------------------------------------------------------------------------- stderr


@contextlib.contextmanager
def without_harmless_lines() -> Iterator[None]:
    """Hold back what the block writes to stderr, and write it at the end without the lines that mean nothing.

    When the process dies inside the block, the launcher finds all of it in the notes folder (`read_held_back`).
    Only on rank 0 of the launcher's job, whose stderr is the terminal.
    """
    own = own_folder()
    if own is None or own[1] != 0:
        yield
        return
    path = Path(own[0], "held_back")
    sys.stderr.flush()
    terminal = os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        text = read_held_back(own[0])
        path.unlink(missing_ok=True)
        sys.stderr.write(text)


def read_held_back(folder: str | os.PathLike[str]) -> str:
    """What rank 0 wrote to stderr before it died in `without_harmless_lines`, without those lines."""
    with contextlib.suppress(OSError):
        return drop_harmless(Path(folder, "held_back").read_text(encoding="utf-8", errors="replace"))
    return ""
