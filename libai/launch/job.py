"""Run one job from start to end for libai/cli/launch.py, and restart it after a failure while
restarts are left.

`oneflow.distributed.launch` starts the ranks. It can leave ranks running and does not report which
rank failed first, so libai/launch/supervisor.py watches them. Uses only the standard library.
oneflow is never imported in this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from libai.launch.guard import NOT_BEGUN, signals_handled
from libai.launch.machines import Ending, Machines
from libai.launch.rank import end_with_parent
from libai.launch.requirements import explain_import_error
from libai.launch.supervisor import Rank, Supervisor
from libai.utils import rank_notes
from libai.utils.errors import EXIT_FAILED, UserError
from libai.utils.screen import say

#: start of the name of a job's folder of notes, and the file in it that its launcher locks
_NOTES, _LOCK = "libai-notes-", "launcher"
_NEW_SECONDS = 60.0
#: module of the training program; `TRAIN_NET` is the file in the repository that calls it
TRAINING = "libai.cli.train_net"
#: flags that suppress messages about the start
SILENT = {"--print-config", "--quiet"}
TRAIN_NET = Path(__file__).resolve().parents[2] / "tools" / "train_net.py"


@dataclass(frozen=True)
class Job:
    """A program to run on this machine.

    Attributes:
        file: absolute path of a program, or the name of a libai module.
        config: absolute path.
        arguments: passed to the program unchanged.
    """

    file: str
    config: str
    num_processes: int
    arguments: tuple[str, ...]
    num_nodes: int
    node_rank: int
    address: str
    port: int

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.num_processes * self.num_nodes

    @property
    def is_training(self) -> bool:
        """True if the job runs libai's own training program, whose config, flags and phases the
        launcher supports.
        """
        return self.file in (TRAINING, str(TRAIN_NET))

    def announce(self, text: str) -> None:
        """Print what the user is waiting for, unless a flag suppresses it or the program is not
        libai's own.
        """
        if self.is_training and SILENT.isdisjoint(self.arguments):
            # `say` would remove a line that rank 0 has not finished
            rank_notes.write_stderr(f"libai: {text}\n".encode())

    def announce_start(self) -> None:
        """Print the config and the number of processes immediately, because importing oneflow takes
        seconds.
        """
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        config = Path(self.config)
        name = (
            config.parent.name if config.name == "config.yaml" else config.name
        )  # users know a run by its folder
        self.announce(f"starting {name} on {processes}")


def prepare_ranks(job: Job, notes: str, machines: Machines) -> Supervisor:
    """Return a supervisor that runs `oneflow.distributed.launch`, which starts each rank through
    libai/launch/rank.py.

    Rank 0 writes to the terminal. Every other rank prints to the file rank_<number>.stderr in
    `notes`, and later to one in the output folder (`keep_output`). Of programs other than libai's,
    which may print on every rank, only stderr goes there.
    """
    first = job.node_rank * job.num_processes
    ranks = []
    for number in range(first, first + job.num_processes):
        ranks.append(Rank(number, notes, rank_notes.make_state(notes, number)))
        ranks[-1].state.limit = rank_notes.read_limit(
            rank_notes.START_LIMIT, rank_notes.DEFAULT_START_SECONDS
        )
    options = {
        "--nnodes": job.num_nodes,
        "--node_rank": job.node_rank,
        "--nproc_per_node": job.num_processes,
        "--master_addr": job.address,
        "--master_port": job.port,
    }
    words = [str(word) for option in options.items() for word in option]
    # `-m oneflow.distributed.launch` would import oneflow first, which takes half a second
    command = [sys.executable, "-I", str(_oneflow_launcher()), *words]
    # by its path, because -m would let a json.py in the working directory replace Python's
    command += [
        str(Path(__file__).with_name("rank.py")),
        str(int(job.is_training)),
        job.file,
        "--config-file",
        job.config,
    ]
    facts = {
        rank_notes.NOTES_VARIABLE: notes,
        rank_notes.LOCAL_RANKS_VARIABLE: str(job.num_processes),
    }
    command += job.arguments
    announce = job.announce if job.is_training else None
    start = functools.partial(_start, command, facts)
    return Supervisor(start, ranks, announce, machines)


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={**os.environ, **variables},
        start_new_session=True,  # OneFlow's launcher signals the process group that it leads
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=functools.partial(end_with_parent, os.getpid()),
    )


def _oneflow_launcher() -> Path:
    """Return the file of `oneflow.distributed.launch`.

    The file does not need the rest of the package, whose import takes 0.5 s. Raises `UserError` if
    it is missing.
    """
    package = importlib.util.find_spec("oneflow")
    if package is None or not package.submodule_search_locations:
        missing = ModuleNotFoundError("No module named 'oneflow'", name="oneflow")
        raise UserError(explain_import_error(missing))
    path = Path(package.submodule_search_locations[0], "distributed", "launch.py")
    if not path.is_file():
        raise UserError(
            f"oneflow in {path.parent.parent} has no distributed/launch.py; oneflow==0.9.0 is "
            "needed."
        )
    return path


# ------------------------------------------------------------------------------ until the job's end


def launch(job: Job, machines: Machines) -> Ending:
    """Run the job's ranks until they have ended on all machines. No rank outlives the call."""
    _remove_old_notes()
    with (
        tempfile.TemporaryDirectory(prefix=_NOTES, ignore_cleanup_errors=True) as notes,
        open(Path(notes, _LOCK), "w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        return prepare_ranks(job, notes, machines).run()


def _remove_old_notes() -> None:
    """Remove the folders of notes that killed launchers have left behind.

    The lock of a launcher lasts as long as its process, also in another container.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_NOTES}*"):
        # an error: the folder belongs to another user, or to a job that runs
        with contextlib.suppress(OSError), open(folder / _LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > _NEW_SECONDS:  # else it may not be locked yet
                shutil.rmtree(folder, ignore_errors=True)


def stop_before_start(signum: int, frame: object) -> None:
    """Handle a signal while no rank runs."""
    say(NOT_BEGUN)
    sys.exit(128 + signum)


def run_job(job: Job, max_restarts: int, new_port: Callable[[], int] | None) -> int:
    """Run the job, restart it after a failure while restarts are left, and return its exit code.

    `new_port() -> int` returns a new port for each restart. It is None if the user has chosen the
    port. A job is not restarted after a stop, a user's mistake, or a repeated failure of the same
    kind in the same iteration.
    """
    facts = {"NODE": job.num_nodes, "PROCS": job.num_processes, "--max-restarts": max_restarts}
    machines = Machines(job.node_rank, job.num_nodes, job.address, job.port, facts)
    # restarts that are left, the last failure, and the iteration of the newest checkpoint
    state: dict[str, Any] = {"left": max_restarts, "last": None, "written": 0}
    while True:
        # a launcher that was started again by hand joins the others
        with signals_handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop_before_start)):
            state = machines.meet(state)
        if state["written"] and job.is_training:  # do not resume from checkpoints of an earlier run
            # the last value of a flag counts
            job = replace(job, arguments=(*job.arguments, "--resume", "--reset="))
        ended = launch(job, machines)
        if ended.code != EXIT_FAILED or ended.was_stopped or not max_restarts:
            return ended.code
        failure = None if ended.report is None else ended.report.failure
        if failure is not None and failure == state["last"]:
            say(f"launch: {failure[0]} in iteration {failure[1]} happened again: not restarting.")
            return ended.code
        if state["left"] == 0:
            say(f"launch: failed after {max_restarts} restarts: giving up.")
            return ended.code
        state = {"left": state["left"] - 1, "last": failure, "written": ended.written}
        if new_port is not None and not machines.are_several:
            job = replace(job, port=new_port())
        start = "as before, with the same arguments"
        if ended.written and job.is_training:
            start = f"from iter_{ended.written:07d}"
        say(f"launch: starting again {start}; {state['left']} restarts left.")
