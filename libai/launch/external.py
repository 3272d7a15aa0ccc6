"""Launchers that have started this process as one of many: `find_place` reads its place among them.

Known are oneflow.distributed.launch, Open MPI's mpirun, MPICH's and Intel's (Hydra), srun, and indexed jobs of
Kubernetes. Standard library only. Not here: libai's own launcher (libai/launch/job.py).
"""

from __future__ import annotations

import re
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libai.launch import runtime
from libai.launch.request import DEFAULT_PORT, read_port
from libai.utils.errors import UserError
from libai.utils.rank_notes import FAILURE_DIR_VARIABLE

Environment = Mapping[str, str]
LOOPBACK = "127.0.0.1"
KUBERNETES = "the Kubernetes job"


@dataclass(frozen=True)
class Place:
    """This process's place among those that `launcher` has started, and where rank 0 listens."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @property
    def is_machine(self) -> bool:
        """Whether it is the only process of its machine, where libai may start several ranks."""
        return self.local_size == 1

    def describe(self) -> str:
        """For messages: `srun (process 1 of 4)`."""
        return f"{self.launcher} (process {self.rank} of {self.size})"


def find_place(environment: Environment) -> Place | None:
    """The place that the environment tells, None where this process was started alone; `UserError` for contradictions.

    Of launchers inside of each other the inner one counts: one process a machine is what an outer one may start.
    """
    readers = (_oneflow, _open_mpi, _hydra, _slurm, _kubernetes)
    found = [place for read in readers if (place := read(environment)) is not None and place.size > 1]
    for place in found:
        _check(place)
    for outer in found[1:]:
        inner = found[0]
        if not outer.is_machine and (outer.rank, outer.size) != (inner.rank, inner.size):
            raise UserError(
                f"two launchers contradict each other: {inner.describe()} and {outer.describe()}. Start the processes "
                f"with one of them, or with one process a machine of {outer.launcher}."
            )
    return found[0] if found else None


def _check(place: Place) -> None:
    if place.rank >= place.size or place.local_rank >= place.local_size or place.local_size > place.size:
        raise UserError(
            f"the environment of {place.launcher} contradicts itself: process {place.rank} of {place.size}, on its "
            f"machine {place.local_rank} of {place.local_size}. Variables of another job may be left in it."
        )


def machine_variables(place: Place, environment: Environment) -> dict[str, str]:
    """The variables that libai's own launcher reads, for a process that is the only one of its machine.

    Waits until the address has a name: the pods of a Kubernetes job do not come up at once.
    """
    wanted = {"NODE": str(place.size), "NODE_RANK": str(place.rank), "ADDR": place.address, "PORT": str(place.port)}
    for name in ("NODE", "NODE_RANK"):
        if environment.get(name, wanted[name]) != wanted[name]:
            raise UserError(
                f"{name}={environment[name]}, and {place.describe()} says {wanted[name]}: they contradict each other. "
                f"Unset {name}."
            )
    if place.launcher == KUBERNETES:
        _wait_for_name(place.address, runtime.connect_seconds())
    return wanted


def _wait_for_name(address: str, seconds: float) -> None:
    """Return when `address` can be resolved, or after so many seconds; who uses it then says what is wrong."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.gethostbyname(address)
            return
        except OSError:
            time.sleep(0.5)


# ---------------------------------------------------------------------------------------------- one reader each


def _oneflow(environment: Environment) -> Place | None:
    """Variables of oneflow.distributed.launch and of others that follow the same convention.

    Those that libai's own launcher has set for a rank do not count: what a rank starts is a job of its own.
    """
    if FAILURE_DIR_VARIABLE in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    number = _numbers("oneflow.distributed.launch", environment)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise UserError(
                f"WORLD_SIZE={environment['WORLD_SIZE']}, and {name} is not set. Set it, or unset WORLD_SIZE."
            )
    size, local_rank = number("WORLD_SIZE"), number("LOCAL_RANK")
    # it does not say how many there are on a machine: more than one, since it was used
    local_size = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else size
    port = number("MASTER_PORT")
    name = "oneflow.distributed.launch"
    return Place(name, number("RANK"), size, local_rank, local_size, environment["MASTER_ADDR"], port)


def _open_mpi(environment: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    number = _numbers("mpirun of Open MPI", environment)
    size, local_size = number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environment.get("OMPI_MCA_ess_base_jobid") or environment.get("PMIX_NAMESPACE")
    return Place(
        "mpirun of Open MPI",
        number("OMPI_COMM_WORLD_RANK"),
        size,
        number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size,
        _address(environment, size == local_size, "mpirun", lambda: None, "mpirun -x ADDR=HOST"),
        _port(environment, job),
    )


def _hydra(environment: Environment) -> Place | None:
    """mpirun of MPICH, Intel MPI and MVAPICH."""
    if "PMI_SIZE" not in environment or "MPI_LOCALNRANKS" not in environment:  # srun may set the first alone
        return None
    number = _numbers("mpirun of MPICH", environment)
    size, local_size = number("PMI_SIZE"), number("MPI_LOCALNRANKS")
    address = _address(environment, size == local_size, "mpirun", lambda: None, "mpirun -genv ADDR HOST")
    rank, local_rank = number("PMI_RANK"), number("MPI_LOCALRANKID")
    return Place("mpirun of MPICH", rank, size, local_rank, local_size, address, _port(environment, None))


def _slurm(environment: Environment) -> Place | None:
    """Tasks of srun; in a batch script itself there is no step, and nothing is started."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    number = _numbers("srun", environment)
    size = number("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS")
    if size == 1:
        return None
    local_size = _tasks_here(environment, number("SLURM_NODEID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    return Place(
        "srun",
        number("SLURM_PROCID"),
        size,
        number("SLURM_LOCALID"),
        local_size,
        _address(environment, size == local_size, "srun", lambda: first_host(nodes), "ADDR=HOST srun ..."),
        _port(environment, f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"),
    )


def _kubernetes(environment: Environment) -> Place | None:
    """A pod of an indexed job, which knows its number; how many there are and where the first is, its manifest says."""
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    number = _numbers(KUBERNETES, environment)
    if not environment.get("NODE"):
        raise UserError(
            "this is a pod of an indexed Kubernetes job, which does not tell how many there are. Set NODE in its "
            "manifest to the job's completions, as in tools/kubernetes_example.yaml; NODE=1 for jobs of one pod each."
        )
    size, rank = number("NODE"), number("JOB_COMPLETION_INDEX")
    if size == 1:
        return None
    if environment.get("NODE_RANK", str(rank)) != str(rank):
        raise UserError(
            f"NODE_RANK={environment['NODE_RANK']} and JOB_COMPLETION_INDEX={rank} contradict each other. Leave "
            "NODE_RANK out: the index of the pod is its number."
        )
    address = _address(environment, False, KUBERNETES, lambda: None, "env: ADDR in the manifest")
    return Place(KUBERNETES, rank, size, 0, 1, address, _port(environment, None))


# ------------------------------------------------------------------------------------------------------- parts


def _numbers(launcher: str, environment: Environment) -> Callable[[str], int]:
    """A function that reads a variable as a whole number; `UserError` where it is none, or missing."""

    def number(name: str) -> int:
        text = environment.get(name, "")
        if not (text.isascii() and text.isdecimal()):
            found = f"{name} is {text!r}" if name in environment else f"{name} is not set"
            raise UserError(
                f"{launcher} has started this process, and {found}: its place among the others is not known. "
                "Start it again, or unset the variables of that launcher."
            )
        return int(text)

    return number


def _address(
    environment: Environment, is_one_machine: bool, launcher: str, look: Callable[[], str | None], example: str
) -> str:
    given = environment.get("ADDR") or environment.get("MASTER_ADDR")
    found = given or (LOOPBACK if is_one_machine else look())
    if not found:
        raise UserError(
            f"{launcher} has started processes on several machines and does not tell where rank 0 is. Set ADDR to an "
            f"address of that machine for all of them: {example}."
        )
    return found


def _port(environment: Environment, job: str | None) -> int:
    """The port that PORT or MASTER_PORT names, else one that follows from the job: all ranks find the same."""
    given = read_port(environment.get("PORT") or environment.get("MASTER_PORT") or "")
    return given or (20000 + zlib.crc32(job.encode()) % 10000 if job else DEFAULT_PORT)


def _tasks_here(environment: Environment, node: int) -> int:
    """The number of tasks on this node, from `2(x3),1`: two on each of three nodes, one on the fourth."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if node >= len(counts):
        raise UserError(
            f"srun has started this process on node {node}, and SLURM_STEP_TASKS_PER_NODE={text!r} has no such node. "
            "Start it again with srun."
        )
    return counts[node]


def first_host(nodes: str) -> str | None:
    """The first of Slurm's list of hosts.

    >>> first_host("gpu[07-09,12],cpu1"), first_host("a-1,b"), first_host("")
    ('gpu07', 'a-1', None)
    """
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return None if found is None else "".join(part or "" for part in found.groups())
