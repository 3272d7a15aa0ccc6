"""Detect whether another launcher started this process, and read its rank, the number of processes
and the address.

Supports oneflow.distributed.launch, Open MPI's mpirun and srun. Uses only the standard library.
libai's own launcher is in libai/launch/job.py.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from libai.launch.request import DEFAULT_PORT, read_port
from libai.utils.errors import UserError
from libai.utils.rank_notes import NOTES_VARIABLE

Environment = Mapping[str, str]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class _Launcher:
    """Names of the environment variables that the launcher `name` sets for each process it
    starts.
    """

    name: str
    size: str
    rank: str
    local_rank: str
    #: number of processes on this machine, or on each machine in Slurm's notation: `2(x3),1`
    local_size: str
    #: variables that identify the job; two jobs then use different ports
    job: tuple[str, ...]
    #: hosts of the job; the first one has rank 0
    hosts: str = ""
    #: example of a command that passes the address of rank 0 to all processes
    example: str = ""


ONEFLOW = _Launcher(
    "oneflow.distributed.launch",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    job=(),
    example="--master_addr HOST",
)
OPEN_MPI = _Launcher(
    "mpirun of Open MPI",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    example="mpirun -x ADDR=HOST",
)
SRUN = _Launcher(
    "srun",
    "SLURM_STEP_NUM_TASKS",  # not set in a batch script itself, which is not a step
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    hosts="SLURM_STEP_NODELIST",
    example="ADDR=HOST srun ...",
)


@dataclass(frozen=True)
class Place:
    """Rank of this process among those started by `launcher`, and the address and port where rank 0
    listens.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @property
    def is_machine(self) -> bool:
        """True if this is the only process on its machine. libai may then start several ranks
        there.
        """
        return self.local_size == 1

    def describe(self) -> str:
        """Return a description for messages, such as `srun (process 1 of 4)`."""
        return f"{self.launcher} (process {self.rank} of {self.size})"


def find_place(environment: Environment) -> Place | None:
    """Return the place given by the environment, or None if no other launcher started this process.

    If launchers are nested, the inner one counts. An outer launcher may only start one process per
    machine. Raises `UserError` for contradictions.
    """
    found = []
    for launcher in (ONEFLOW, OPEN_MPI, SRUN):
        is_ours = (
            launcher is ONEFLOW and NOTES_VARIABLE in environment
        )  # started by libai's own launcher
        if not is_ours and environment.get(launcher.size, "1") != "1":
            found.append(_read(launcher, environment))
    for outer in found[1:]:
        inner = found[0]
        if not outer.is_machine and (outer.rank, outer.size) != (inner.rank, inner.size):
            raise UserError(
                f"two launchers contradict each other: {inner.describe()} and {outer.describe()}. "
                f"Start the processes with only one of them, or let {outer.launcher} start one "
                "process on each machine."
            )
    return found[0] if found else None


def machine_variables(place: Place, environment: Environment) -> dict[str, str]:
    """Return the variables that libai's own launcher reads, for the only process on its machine.

    Raises `UserError` if NODE or NODE_RANK is already set to another value.
    """
    wanted = {
        "NODE": str(place.size),
        "NODE_RANK": str(place.rank),
        "ADDR": place.address,
        "PORT": str(place.port),
    }
    for name in ("NODE", "NODE_RANK"):
        if environment.get(name, wanted[name]) != wanted[name]:
            raise UserError(
                f"{name}={environment[name]} contradicts {place.describe()}, which gives "
                f"{wanted[name]}. Unset {name}."
            )
    return wanted


def _read(launcher: _Launcher, environment: Environment) -> Place:
    def number(name: str) -> int:
        text = environment.get(name, "")
        if not (text.isascii() and text.isdecimal()):
            raise UserError(
                f"{launcher.name} has started this process, and {name} is {text!r}, so its rank "
                "is unknown. Start the job again, or unset the variables of that launcher."
            )
        return int(text)

    def given(name: str) -> str:
        own = "" if launcher is ONEFLOW else environment.get(name)
        return own or environment.get(f"MASTER_{name}") or ""

    size = number(launcher.size)
    rank = number(launcher.rank)
    local_rank = number(launcher.local_rank)
    node = number("SLURM_NODEID") if launcher is SRUN else 0
    # oneflow's launcher does not set this variable
    text = environment.get(launcher.local_size, str(size) if launcher is ONEFLOW else "")
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if node >= len(counts) or rank >= size or not local_rank < counts[node] <= size:
        raise UserError(
            f"the environment of {launcher.name} contradicts itself: process {rank} of {size}, "
            f"{local_rank} on machine {node}, and {launcher.local_size}={text!r}. It may contain "
            "variables of another job."
        )
    address = given("ADDR") or (
        LOOPBACK if size == counts[node] else first_host(environment.get(launcher.hosts, ""))
    )
    if not address:
        raise UserError(
            f"{launcher.name} has started processes on several machines but does not set the "
            "address of rank 0. Set ADDR to an address of that machine for all processes: "
            f"{launcher.example}."
        )
    # Without PORT, derive the port from the job, which gives the same port on all ranks.
    job = ".".join(environment.get(name, "") for name in launcher.job).strip(".")
    port = read_port(given("PORT")) or (
        20000 + zlib.crc32(job.encode()) % 10000 if job else DEFAULT_PORT
    )
    return Place(launcher.name, rank, size, local_rank, counts[node], address, port)


def first_host(nodes: str) -> str | None:
    """Return the first host in Slurm's list of hosts, or None if the list is empty.

    >>> first_host("gpu[07-09,12],cpu1"), first_host("a-1,b"), first_host("")
    ('gpu07', 'a-1', None)
    """
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return None if found is None else "".join(part or "" for part in found.groups())
