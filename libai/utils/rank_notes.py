"""What a rank and the launcher of its machine tell each other, through small files in a folder that the launcher makes.

Ranks note what they are at, how far they are and how they leave, and can be asked for their Python stacks, also while
they wait inside oneflow. Standard library only. Not here: what a rank failed with (libai.launch.guard), and who reads
all this (libai/launch/ranks.py, libai/launch/watch.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: set by the launcher: the folder of the notes, and the number of ranks on this machine
FAILURE_DIR_VARIABLE = "LIBAI_FAILURE_DIR"
LOCAL_RANKS_VARIABLE = "LIBAI_LOCAL_RANKS"
#: names the job, the same one when its ranks are started again after a failure (`--max-restarts`)
JOB_VARIABLE = "LIBAI_JOB"
#: seconds since 1970 when the launcher began: the time of `${now:...}` on every rank, also when started again
START_VARIABLE = "LIBAI_START_TIME"
#: set by `begin_notes`: the process that is the rank; what it starts inherits all other variables and is none
RANK_PID_VARIABLE = "LIBAI_RANK_PID"

#: what makes a process a rank: with these, `import oneflow` waits for the other ranks of the job
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")

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
    """The notes folder and this process's rank; None when it is no rank of the launcher."""
    folder, rank = os.environ.get(FAILURE_DIR_VARIABLE), int(os.environ.get("RANK", -1))
    is_rank = os.environ.get(RANK_PID_VARIABLE, str(os.getpid())) == str(os.getpid())
    return (Path(folder), rank) if folder and rank >= 0 and is_rank else None


def world_size() -> int:
    """Number of ranks of the job that this process belongs to, as its launcher says."""
    return int(os.environ.get("WORLD_SIZE", 1))


def environment_of_no_rank() -> dict[str, str]:
    """This process's environment for one that has no place in its job."""
    return {name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES}


# ------------------------------------------------------------------------------------------------- leaving

_CODE_WIDTH = 8


def reserve_leaving(folder: str | os.PathLike[str], ranks: range) -> None:
    """Make the files of `note_leaving` ahead, so that a disk that fills up cannot turn a good end into a failure."""
    for rank in ranks:
        Path(folder, f"leaving_{rank}").write_text(" " * _CODE_WIDTH, encoding="utf-8")


def note_leaving(code: int) -> None:
    """Tell the launcher that this rank's work is done, with this exit code, whatever oneflow does to it from now on.

    A rank that ends without this note has failed, whatever its exit code.
    """
    own = own_folder()
    if own is not None:
        with contextlib.suppress(OSError):  # the exit code itself must come out whatever the disk does
            descriptor = os.open(own[0] / f"leaving_{own[1]}", os.O_WRONLY | os.O_CREAT, 0o644)
            with contextlib.closing(os.fdopen(descriptor, "w", encoding="utf-8")) as file:
                file.write(str(code).ljust(_CODE_WIDTH))


def read_leaving(folder: str | os.PathLike[str]) -> dict[int, int]:
    """The exit codes that ranks have noted in `folder`, by rank. A note cut short by a kill is left out."""
    codes = {}
    for path in Path(folder).glob("leaving_*"):
        with contextlib.suppress(ValueError, OSError):
            codes[int(path.name.removeprefix("leaving_"))] = int(path.read_text(encoding="utf-8"))
    return codes


# ------------------------------------------------------------------------------------------------ progress

#: what a rank can be at, and how to say so. The first ones come in this order when a run starts, and ranks that are
#: further wait there for the last one.
PHASES = {
    "import": "importing",
    "meet": "meeting the other ranks",
    "build": "building data and model",
    "load": "loading a checkpoint",
    "compile": "compiling",
    "train": "training",
    "evaluate": "evaluating",
    "save": "saving",
    "finish": "finishing",
    "between": "between two phases",
}
STARTING = ("import", "meet", "build", "load", "compile")


def phase_name(name: str) -> str:
    """How a message calls a phase."""
    return PHASES.get(name, name)


@dataclass(frozen=True)
class Progress:
    """How far a rank was: what it is at (one of `PHASES`), iterations completed, and pieces of other work done.

    `is_working` is false outside of libai's trainers: before the first of them and between two runs.
    """

    phase: str
    iteration: int
    steps: int
    is_working: bool


@dataclass
class _Activity:
    """What this process is at. `count() -> (iterations completed, batches evaluated)` while a trainer runs."""

    phases: list[str] = field(default_factory=list)
    base: str = "import"
    steps: int = 0
    count: Callable[[], tuple[int, int]] | None = None
    iteration: int = 0

    def progress(self) -> Progress:
        evaluated = 0
        if self.count is not None:
            self.iteration, evaluated = self.count()
        phase = self.phases[-1] if self.phases else self.base
        return Progress(phase, self.iteration, self.steps + evaluated, bool(self.phases))


_activity = _Activity()


def own_progress() -> Progress:
    """What this process is at and how far, as the host knows it: nothing waits for the device."""
    return _activity.progress()


def begin_notes() -> None:
    """Make this process the rank that the launcher's variables name, and note its progress from a thread from now on.

    The thread looks twice a second, so that loops pay nothing for it. Does nothing without the launcher.
    """
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())
    if own_folder() is not None:
        _write_progress()
        threading.Thread(target=_sample, name="libai-progress", daemon=True).start()


def _sample() -> None:
    while True:
        with contextlib.suppress(Exception):  # a trainer that is being replaced may have nothing to tell
            _write_progress()
        threading.Event().wait(SAMPLE_SECONDS)


_written: Progress | None = None
_write_lock = threading.Lock()


def _write_progress() -> None:
    """Write what this process is at, where that has changed."""
    global _written
    own = own_folder()
    if own is None:
        return
    with _write_lock:  # what is written last must be the newest: the interpreter may be locked from then on
        progress = _activity.progress()
        if progress == _written:
            return
        with contextlib.suppress(OSError):
            new = Path(own[0], f".progress_{own[1]}")
            new.write_text(json.dumps(asdict(progress)), encoding="utf-8")
            new.replace(new.with_name(f"progress_{own[1]}"))  # a rank without a report could not act on Ctrl-C
            _written = progress


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Tell the launcher what this rank is at while the block runs: one of `PHASES`; also a decorator.

    The launcher limits how long a phase may go without progress (docs/launching.md). An exception that leaves the
    block keeps the name of the innermost phase as `left_phase`.
    """
    assert name in PHASES, name
    _activity.phases.append(name)
    _write_progress()
    try:
        yield
    except BaseException as error:
        if not hasattr(error, "left_phase"):
            with contextlib.suppress(AttributeError):
                error.left_phase = name  # type: ignore[attr-defined]
        raise
    finally:
        _activity.phases.pop()
        _activity.base = "import" if name == "meet" else "between"
        _write_progress()


def note_progress(count: int = 1) -> None:
    """Say that a long piece of work goes on, such as reading a large corpus; costs nothing worth mentioning.

    The launcher ends a job in which no rank has made progress for as long as its phase allows.
    """
    _activity.steps += count


@contextlib.contextmanager
def report_progress(count: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """The phase "train", with `count() -> (iterations completed, batches evaluated)` as its progress."""
    before, _activity.count = _activity.count, count
    try:
        with phase("train"):
            yield
    finally:
        _activity.progress()  # keeps the last iteration
        _activity.count = before


def read_progress(folder: str | os.PathLike[str]) -> dict[int, Progress]:
    """What ranks have reported in `folder`, by rank."""
    found = {}
    for path in Path(folder).glob("progress_*"):
        with contextlib.suppress(ValueError, OSError):
            found[int(path.name.removeprefix("progress_"))] = Progress(**json.loads(path.read_text(encoding="utf-8")))
    return found


def read_failed_phase(folder: str | os.PathLike[str], rank: int) -> str | None:
    """The phase that the error of a failed rank came out of (`libai.launch.guard` notes it); None without one."""
    with contextlib.suppress(ValueError, OSError):
        return json.loads(Path(folder, f"rank_{rank}.json").read_text(encoding="utf-8")).get("phase")
    return None


# ----------------------------------------------------------------------------------------------- output folder


def note_output_folder(path: str | os.PathLike[str]) -> None:
    """Tell the launcher where this run keeps its files; the errors of its ranks are kept there."""
    own = own_folder()
    if own is not None:
        with contextlib.suppress(OSError):
            Path(own[0], "output_folder").write_text(os.path.abspath(path), encoding="utf-8")


def read_output_folder(folder: str | os.PathLike[str]) -> Path | None:
    """What a rank has told by `note_output_folder`."""
    with contextlib.suppress(OSError):
        return Path(Path(folder, "output_folder").read_text(encoding="utf-8"))
    return None


# -------------------------------------------------------------------------------------------------- stacks


def dump_stacks_on_signal() -> None:
    """Let `STACK_SIGNAL`, and what ends this rank in native code, write its Python stacks into the notes folder."""
    own = own_folder()
    if own is not None:
        # open for as long as the process lives
        asked, last = (open(Path(own[0], f"{name}_{own[1]}"), "w") for name in ("stack", "crash"))  # noqa: SIM115
        faulthandler.register(STACK_SIGNAL, file=asked, all_threads=True)
        faulthandler.enable(file=last, all_threads=True)


def read_stack(folder: str | os.PathLike[str], rank: int, name: str = "stack") -> list[str]:
    """The frames of a rank's main thread, innermost first, as `faulthandler` writes them. Empty when it gave none.

    `name`: "crash" for those from when native code ended the rank (SIGSEGV, SIGABRT, SIGFPE, SIGBUS, SIGILL).
    """
    with contextlib.suppress(OSError):
        text = Path(folder, f"{name}_{rank}").read_text(encoding="utf-8", errors="replace")
        threads = [block for block in text.split("\n\n") if "  File " in block]
        main_thread = threads[-1] if threads else ""  # faulthandler writes the newest thread first
        return [line.strip() for line in main_thread.splitlines() if line.strip().startswith("File ")]
    return []


# -------------------------------------------------------------------------------------------------- stderr


@contextlib.contextmanager
def without_harmless_lines() -> Iterator[None]:
    """Hold back what the block writes to stderr, and write it at the end without the lines that mean nothing.

    When the process dies inside the block, the launcher finds all of it in the notes folder (`read_held_back`).
    Only on rank 0 of the launcher's job, whose stderr is the terminal, and in commands (`hide_harmless_lines`) and
    notebooks, where a process of its own leaves the lines out.
    """
    own = own_folder()
    if own is None and (_hides_harmless_lines or "ipykernel" in sys.modules):
        with _filtered_stderr():
            yield
        return
    if own is None or own[1] != 0:
        yield
        return
    path = Path(own[0], "held_back")
    try:
        with open(path, "wb") as file, _stderr_into(file.fileno()):
            yield
    finally:
        text = read_held_back(own[0])
        path.unlink(missing_ok=True)
        sys.stderr.write(text)


_hides_harmless_lines = False


def hide_harmless_lines() -> None:
    """Let `without_harmless_lines` act in this process although no launcher has started it."""
    global _hides_harmless_lines
    _hides_harmless_lines = True


@contextlib.contextmanager
def _stderr_into(descriptor: int) -> Iterator[None]:
    """What native code and Python write to stderr in the block goes to `descriptor`."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Put grep between the block and stderr: what the block says comes out even when native code ends the process."""
    words = [word for line in HARMLESS for word in ("-e", line)]
    try:
        grep = subprocess.Popen(["grep", "-avF", *words], stdin=subprocess.PIPE, stdout=2)
    except OSError:  # there is none
        yield
        return
    with grep:
        assert grep.stdin is not None
        with _stderr_into(grep.stdin.fileno()):
            yield


def read_held_back(folder: str | os.PathLike[str]) -> str:
    """What rank 0 wrote to stderr before it died in `without_harmless_lines`, without those lines."""
    with contextlib.suppress(OSError):
        return drop_harmless(Path(folder, "held_back").read_text(encoding="utf-8", errors="replace"))
    return ""
