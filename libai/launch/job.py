"""Run one job from start to end for libai/cli/launch.py, and restart it after a failure while
restarts are left.

`oneflow.distributed.launch` starts the ranks. It can leave ranks running and does not report which
rank failed first, so libai/launch/supervisor.py watches them. Uses only the standard library.
oneflow is never imported in this process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from libai.launch import runtime
from libai.launch.rank import end_with_parent, output_file
from libai.launch.supervisor import Rank, Supervisor
from libai.utils import rank_notes
from libai.utils.errors import EXIT_FAILED, UserError
from libai.utils.screen import is_terminal, say

# On several machines, oneflow's heartbeat takes up to 13 s to report a failure to the other ranks
# and end them.
MULTI_NODE_RESTART_SECONDS = 20.0
#: module of the training program; `TRAIN_NET` is the file in the repository that calls it
TRAINING = "libai.cli.train_net"
#: flags that suppress messages about the start
SILENT = {"--print-config", "--quiet", "--help", "-h"}
TRAIN_NET = Path(__file__).resolve().parents[2] / "tools" / "train_net.py"


@dataclass(frozen=True)
class Job:
    """A program to run on this machine.

    Attributes:
        file: absolute path of a program, or the name of a libai module.
        config: absolute path.
        arguments: passed to the program unchanged.
        output_dir: output folder of the job, if it is known.
    """

    file: str
    config: str
    num_processes: int
    arguments: tuple[str, ...]
    num_nodes: int
    node_rank: int
    address: str
    port: int
    output_dir: Path | None = None

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

        On a terminal, the next output replaces it.
        """
        if self.is_training and SILENT.isdisjoint(self.arguments):
            say(f"libai: {text}", end="" if is_terminal(sys.stderr) else "\n")

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


def prepare_ranks(job: Job, notes: str) -> Supervisor:
    """Return a supervisor that runs `oneflow.distributed.launch`, which starts each rank through
    libai/launch/rank.py.

    Rank 0 writes to the terminal. The output of each other rank is appended to rank_<number>.stderr
    in the output folder. If the job has no output folder, that file is temporary, and only stderr
    goes to it, because programs other than libai's may print on every rank.
    """
    output_folder = _output_folder(job) or notes
    first = job.node_rank * job.num_processes
    ranks = []
    for number in range(first, first + job.num_processes):
        ranks.append(Rank(number, notes, rank_notes.make_state(notes, number)))
        ranks[-1].state.limit = rank_notes.read_limit(
            rank_notes.START_LIMIT, rank_notes.DEFAULT_START_SECONDS
        )
        if number > 0:
            path = output_file(output_folder, number)
            ranks[-1].output, ranks[-1].output_start = (
                path,
                path.stat().st_size if path.is_file() else 0,
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
        output_folder,
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
    return Supervisor(functools.partial(_start, command, facts), ranks, announce, job.num_nodes)


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
        raise UserError(runtime.explain_import_error(missing))
    path = Path(package.submodule_search_locations[0], "distributed", "launch.py")
    if not path.is_file():
        raise UserError(
            f"oneflow in {path.parent.parent} has no distributed/launch.py; oneflow==0.9.0 is "
            "needed."
        )
    return path


def _output_folder(job: Job) -> str | None:
    """Return the folder that ranks above 0 print to: the job's output folder if it is known and
    writable, or None.
    """
    if job.output_dir is not None:
        with contextlib.suppress(OSError):
            job.output_dir.mkdir(parents=True, exist_ok=True)
            return str(job.output_dir) if os.access(job.output_dir, os.W_OK) else None
    return None


# ------------------------------------------------------------------------------ until the job's end


def launch(job: Job) -> tuple[int, bool, tuple[str, int] | None]:
    """Run the job's ranks on this machine until they end. No rank outlives the call.

    Returns the exit code, whether a stop was requested, and the failure if a restart would repeat
    it.
    """
    with tempfile.TemporaryDirectory(prefix="libai-", ignore_cleanup_errors=True) as notes:
        supervisor = prepare_ranks(job, notes)
        code = supervisor.run()
        return code, supervisor.stop_signal is not None, supervisor.failure()


def run_job(job: Job, max_restarts: int, new_port: Callable[[], int] | None) -> int:
    """Run the job, restart it after a failure while restarts are left, and return its exit code.

    `new_port() -> int` returns a new port for each restart. It is None if the user has chosen the
    port. A job is not restarted after a stop, a user's mistake, or a repeated failure of the same
    kind in the same iteration.
    """
    before = _checkpoints(job)
    restarts_left, last_failure = max_restarts, None
    while True:
        code, was_stopped, failure = launch(job)
        if code != EXIT_FAILED or was_stopped or not max_restarts:
            return code
        if failure is not None and failure == last_failure:
            say(f"launch: {failure[0]} in iteration {failure[1]} happened again: not restarting.")
            return code
        if restarts_left == 0:
            say(f"launch: failed after {max_restarts} restarts: giving up.")
            return code
        restarts_left, last_failure = restarts_left - 1, failure
        if job.num_nodes > 1:
            time.sleep(MULTI_NODE_RESTART_SECONDS)
        elif new_port is not None:
            job = replace(job, port=new_port())
        new = _checkpoints(job) - before  # do not resume from checkpoints of an earlier run
        if new:
            job = replace(
                job, arguments=(*job.arguments, "--resume", "--reset=")
            )  # the last value of a flag counts
        start = f"from {max(new)[0]}" if new else "as before, with the same arguments"
        say(f"launch: starting again {start}; {restarts_left} restarts left.")


def _checkpoints(job: Job) -> set[tuple[str, int]]:
    """Return the name and modification time of every checkpoint in the job's output folder, if it
    is accessible.
    """
    folder = _output_folder(job)
    if folder is None:
        return set()
    return {
        (path.name, path.stat().st_mtime_ns) for path in Path(folder, "checkpoints").glob("iter_*")
    }
