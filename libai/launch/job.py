"""One job from its ranks' start to its end, and again after a failure while restarts are left. For libai/cli/launch.py.

`oneflow.distributed.launch` works out what each rank gets. The ranks are not its children, because its watch loop
leaves ranks behind (it kills only when it leads a process group, and one failed rank hangs the others): they are
watched by libai/launch/ranks.py. Standard library only: oneflow itself is never imported in this process.
"""

import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from libai.launch import runtime
from libai.launch.ranks import DEFAULT_EXIT_SECONDS, DEFAULT_STOP_SECONDS, Rank, Supervisor
from libai.launch.report import report_end
from libai.launch.watch import StallWatch, read_stall_limits
from libai.utils import rank_notes
from libai.utils.errors import EXIT_RESUMABLE, EXIT_USER_MISTAKE, UserError
from libai.utils.screen import say

# Several machines: oneflow's heartbeat takes up to 13 s to tell the other ranks of a failure; then they are ended.
MULTI_NODE_RESTART_SECONDS = 20.0
#: the program that trains a config, as a module and as the file of the repository that calls it
TRAINING = "libai.cli.train_net"
TRAIN_NET = Path(__file__).resolve().parents[2] / "tools" / "train_net.py"
#: what `oneflow.distributed.launch` sets for a rank
_RANK_VARIABLES = (*rank_notes.RENDEZVOUS_VARIABLES, "OMP_NUM_THREADS", "GLOG_log_dir")
#: a program that writes its environment to a file named after its rank, whole or not at all
_NOTE_ENVIRONMENT = ("sh", "-c", 'env -0 > "$0/$RANK.part" && mv "$0/$RANK.part" "$0/$RANK"')
RANK_BOOTSTRAP = "import sys; from libai.launch.guard import run_script; run_script(sys.argv[1:])"


@dataclass(frozen=True)
class Job:
    """What to run on this machine; `arguments` go to it unchanged.

    `file`: the absolute path of a program, or the name of a module of libai; `config`: an absolute path.

    `output_dir`: where the job keeps its files, when that is known.
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
        """Whether it runs libai's own training program, of which more is known than of others."""
        return self.file in (TRAINING, str(TRAIN_NET))


# ------------------------------------------------------------------------------------------- starting the ranks


def start_ranks(job: Job, ranks: list[Rank], output_folder: Path) -> None:
    """Start the processes of this machine; append each to `ranks` at once.

    Rank 0 writes to the terminal; the stderr of the others is appended to `output_folder`/rank_<number>.stderr, and so
    is in a run of tools/train_net.py their stdout. Other programs may have something to say on every rank.
    """
    command = [sys.executable, "-u", "-c", RANK_BOOTSTRAP, str(os.getpid()), job.file, "--config-file", job.config]
    command += job.arguments
    for variables in rank_variables(job):
        number, environment = int(variables["RANK"]), os.environ | variables
        if number == 0:
            ranks.append(Rank(number, subprocess.Popen(command, env=environment, start_new_session=True)))
            continue
        path = output_folder / f"rank_{number}.stderr"
        with open(path, "ab") as file:
            stdout = file if job.output_dir is not None else None
            process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=stdout, stderr=file)
            inode = os.fstat(file.fileno()).st_ino
            ranks.append(Rank(number, process, stderr=path, stderr_start=file.tell(), stderr_inode=inode))


def rank_variables(job: Job) -> list[dict[str, str]]:
    """The environment variables that `oneflow.distributed.launch` sets for each rank of this machine, in their order.

    It runs with programs that write their environment down in place of the ranks, and is ended when they have.
    """
    options = {
        "--nnodes": job.num_nodes,
        "--node_rank": job.node_rank,
        "--nproc_per_node": job.num_processes,
        "--master_addr": job.address,
        "--master_port": job.port,
    }
    words = [str(word) for option in options.items() for word in option]
    first = job.node_rank * job.num_processes
    with tempfile.TemporaryDirectory(prefix="libai-") as folder:
        files = [Path(folder, str(number)) for number in range(first, first + job.num_processes)]
        command = [sys.executable, "-I", str(_oneflow_launcher()), *words, "--no_python", *_NOTE_ENVIRONMENT, folder]
        with subprocess.Popen(command, start_new_session=True) as launcher:
            while launcher.poll() is None and not all(file.exists() for file in files):
                time.sleep(0.002)
            launcher.kill()
        if not all(file.exists() for file in files):
            raise RuntimeError(f"oneflow.distributed.launch ended with {launcher.returncode} and started no ranks")
        noted = [dict(line.split("=", 1) for line in os.fsdecode(file.read_bytes()).split("\0")[:-1]) for file in files]
    return [{name: one[name] for name in _RANK_VARIABLES if name in one} for one in noted]


def _oneflow_launcher() -> Path:
    """The file of `oneflow.distributed.launch`: it needs nothing of the package, whose import takes 0.5 s."""
    package = importlib.util.find_spec("oneflow")
    if package is None or not package.submodule_search_locations:
        missing = ModuleNotFoundError("No module named 'oneflow'", name="oneflow")
        raise UserError(runtime.explain_import_error(missing))
    path = Path(package.submodule_search_locations[0], "distributed", "launch.py")
    if not path.is_file():
        raise UserError(f"oneflow in {path.parent.parent} has no distributed/launch.py; oneflow==0.9.0 is needed.")
    return path


# ---------------------------------------------------------------------------------------- until the job's end


@dataclass(frozen=True)
class Limits:
    """Seconds to save and stop after a signal, without progress in each phase (0: for ever) and to exit; restarts after
    failures."""

    stop_seconds: float = DEFAULT_STOP_SECONDS
    stall_seconds: Mapping[str, float] = field(default_factory=lambda: read_stall_limits({}))
    max_restarts: int = 0
    exit_seconds: float = DEFAULT_EXIT_SECONDS


@dataclass(frozen=True)
class Outcome:
    """How one attempt of a job ended. `failure`: kind of error and iteration, of one that would come again."""

    code: int
    was_stopped: bool
    failure: tuple[str, int] | None = None


def launch(job: Job, limits: Limits) -> Outcome:
    """Run the job's ranks of this machine to their end. None of them outlives the call."""
    with tempfile.TemporaryDirectory(prefix="libai-", ignore_cleanup_errors=True) as notes_folder:
        first = job.node_rank * job.num_processes
        rank_notes.reserve_leaving(notes_folder, range(first, first + job.num_processes))
        supervisor = Supervisor(
            stop_seconds=limits.stop_seconds,
            exit_seconds=limits.exit_seconds,
            notes_folder=notes_folder,
            stall_watch=StallWatch(notes_folder, limits.stall_seconds, judges_all=job.is_training),
        )
        os.environ[rank_notes.FAILURE_DIR_VARIABLE] = notes_folder
        os.environ[rank_notes.LOCAL_RANKS_VARIABLE] = str(job.num_processes)
        with supervisor.handling_signals():  # also while the end is reported: schedulers repeat their signals
            try:
                start_ranks(job, supervisor.ranks, _output_folder(job, notes_folder))
                supervisor.wait()
            except BaseException:
                supervisor.end(signal.SIGKILL)
                raise
            code = supervisor.exit_code()
            failure = report_end(
                supervisor.ranks, code, notes_folder, job.output_dir, job.num_nodes, supervisor.has_stalled
            )
    return Outcome(code, supervisor.stop_signal is not None, failure)


def _output_folder(job: Job, notes_folder: str) -> Path:
    """Where ranks above 0 print: the job's output folder, where one is known and can be written."""
    if job.output_dir is not None:
        with contextlib.suppress(OSError):
            job.output_dir.mkdir(parents=True, exist_ok=True)
            if os.access(job.output_dir, os.W_OK):
                return job.output_dir
    return Path(notes_folder)


def run_job(job: Job, limits: Limits, new_port: Callable[[], int] | None) -> int:
    """Run the job, again after a failure while restarts are left, and return its exit code.

    `new_port() -> int` gives every start a port of its own; None: the user has chosen one.
    Not started again: what was stopped, a user's mistake, and a failure of the same kind in the same iteration.
    """
    os.environ[rank_notes.JOB_VARIABLE] = secrets.token_hex(8)  # ranks started again continue the run of this job
    before = _checkpoints(job)
    restarts_left, last_failure = limits.max_restarts, None
    while True:
        outcome = launch(job, limits)
        if outcome.code in (0, EXIT_USER_MISTAKE, EXIT_RESUMABLE) or outcome.was_stopped or not limits.max_restarts:
            return outcome.code
        if outcome.failure is not None and outcome.failure == last_failure:
            kind, iteration = outcome.failure
            say(f"launch: {kind} in iteration {iteration} came again: not started again.")
            return outcome.code
        if restarts_left == 0:
            say(f"launch: failed after {limits.max_restarts} restarts: not started again.")
            return outcome.code
        restarts_left, last_failure = restarts_left - 1, outcome.failure
        if job.num_nodes > 1:
            time.sleep(MULTI_NODE_RESTART_SECONDS)
        elif new_port is not None:
            job = replace(job, port=new_port())
        # those of an earlier run must not be taken, unless it was to be resumed anyway
        rest, takes_newest = _split_resume(job.arguments)
        if _checkpoints(job) - before:
            job = replace(job, arguments=(*rest, "--resume"))
        new = _checkpoints(job) - (set() if takes_newest else before)
        resumes = any(word.partition("=")[0] == "--resume" for word in job.arguments)
        start = f"from {max(new)[0]}" if new else "with --resume" if resumes else "from the beginning"
        say(f"launch: starting again {start}; {restarts_left} restarts left.")


def _split_resume(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """`arguments` without `--resume`, `--reset` and their values; and whether the newest checkpoint was to be taken."""
    rest: list[str] = []
    takes_newest, behind = False, ""
    for word in arguments:
        flag, equals, value = word.partition("=")
        if behind and rest and not equals and not word.startswith(("-", "~", "+")):  # the first word is the config
            takes_newest = takes_newest and behind != "--resume"
            behind = ""
            continue
        behind = flag if flag in ("--resume", "--reset") and not equals else ""
        if flag == "--resume":
            takes_newest = not value
        elif flag != "--reset":
            rest.append(word)
    return rest, takes_newest


def _checkpoints(job: Job) -> set[tuple[str, int]]:
    """Return name and time of every checkpoint in the job's output folder."""
    if job.output_dir is None:
        return set()
    return {(path.name, path.stat().st_mtime_ns) for path in (job.output_dir / "checkpoints").glob("iter_*")}
