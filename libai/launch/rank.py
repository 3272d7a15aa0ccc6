"""Run one rank as two processes: the program and its parent, which `oneflow.distributed.launch`
starts.

    python libai/launch/rank.py IS_TRAINING FILE [arguments of FILE …]

The parent records how the program ended, which OneFlow's launcher does not report. Uses only the
standard library.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # replaces this file's folder with the one that contains libai
    sys.path[0] = __file__.rpartition("/libai/launch/")[0]

import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import time
from pathlib import Path
from typing import NoReturn

from libai.launch.guard import TRACEBACK_FLAG, TRACEBACK_VARIABLE, guarded_main
from libai.utils import rank_notes
from libai.utils.installation import make_importable

#: asks a rank for its stacks; a real-time signal, because users and schedulers may use SIGUSR1 and
#: SIGUSR2
STACK_SIGNAL = signal.SIGRTMIN + 3
_PR_SET_PDEATHSIG = 1
#: signals that the parent blocks and leaves to the program
_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def end_with_parent(parent: int) -> None:
    """Make Linux kill this process when `parent` ends, or now if it has ended.

    No rank outlives its launcher.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def output_file(folder: str, rank: int) -> Path:
    """Return the file that a rank above 0 prints to."""
    return Path(folder, f"rank_{rank}.stderr")


def main(is_training: str, file: str, *arguments: str) -> NoReturn:
    """Run the program in a child process, and record how it ends."""
    end_with_parent(os.getpgid(0))  # the leader of the process group is OneFlow's launcher
    folder, rank = os.environ[rank_notes.NOTES_VARIABLE], int(os.environ["RANK"])
    state = rank_notes.open_state(folder, rank)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    parent, program = os.getpid(), os.fork()
    if program:
        state.parent = parent
        _, ended = os.waitpid(program, 0)
        state.status, state.ended_at = os.waitstatus_to_exitcode(ended), time.time()
        os._exit(
            0
        )  # a failure code would make OneFlow's launcher end the other ranks before they report
    end_with_parent(parent)
    if rank > 0:
        _redirect(output_file(folder, rank), (1, 2) if is_training == "1" else (2,))
    # These files stay open as long as the process runs.
    stack, crash = (open(Path(folder, f"{name}_{rank}"), "w") for name in ("stack", "crash"))  # noqa: SIM115
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    faulthandler.enable(file=crash, all_threads=True)
    rank_notes.begin_rank(state, is_training == "1")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    words = list(arguments)
    if (
        is_training != "1" and TRACEBACK_FLAG in words
    ):  # the user's own program may not have such a flag
        words.remove(TRACEBACK_FLAG)
        os.environ[TRACEBACK_VARIABLE] = "1"
    guarded_main(lambda: _run(file, words))


def keep_output(output_dir: Path) -> None:
    """Append what this rank has printed so far to its file in `output_dir`, and print there from
    now on.

    The file in the launcher's folder becomes a link to it. Nothing happens on rank 0, in a process
    without a launcher, and if the folder cannot be written.
    """
    folder = rank_notes.own_folder()
    if folder is None or os.environ["RANK"] == "0":
        return
    rank = int(os.environ["RANK"])
    ours = output_file(str(folder), rank)
    kept = output_file(os.path.abspath(output_dir), rank)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        with open(kept, "ab") as file:
            rank_notes.own_state().output_start = file.tell()
            file.write(ours.read_bytes())
        before = os.stat(ours)
        _redirect(kept, tuple(fd for fd in (1, 2) if os.path.samestat(os.fstat(fd), before)))
        ours.unlink()
        ours.symlink_to(kept)


def _redirect(path: Path, descriptors: tuple[int, ...]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)


def _run(file: str, arguments: list[str]) -> None:
    """Run a Python file or a libai module as `__main__`."""
    sys.argv = [file, *arguments]
    is_file = os.path.isabs(file)
    del sys.path[0]  # the folder that contains libai
    if is_file:
        make_importable(str(Path(file).resolve().parent))
        runpy.run_path(file, run_name="__main__")
    else:
        runpy.run_module(file, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
