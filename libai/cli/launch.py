"""Start the ranks of one job on this machine and make sure that they end together.

    python -m libai.launch FILE CONFIG PROCS [arguments of FILE …]

libai/launch/request.py reads the request, libai/launch/job.py starts the ranks, and
libai/launch/supervisor.py watches them. Uses only the standard library and never imports oneflow.
The ranks check the config, which may import it.

Environment: NODE is the number of machines and NODE_RANK the index of this machine, from 0. ADDR
and PORT belong to the first machine. MAX_RESTARTS is the number of restarts. LIBAI_START_TIMEOUT
and LIBAI_STEP_TIMEOUT are the seconds without progress after which a job is ended, before and after
its first iteration. Exit codes: 0 done, 1 failed, 2 user mistake, 75 stopped but resumable, 128 +
signal if a signal ended ranks that could not save.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from libai.launch import guard, runtime
from libai.launch.command_line import parse_args, take_restarts
from libai.launch.external import LOOPBACK, Place
from libai.launch.job import TRAINING, Job, run_job, stop_before_start
from libai.launch.request import check_cores, choose_port, find_config, find_free_port, read_job
from libai.patches import openblas
from libai.utils.errors import EXIT_USER_MISTAKE, UserError
from libai.utils.installation import ROOT, is_clone
from libai.utils.rank_notes import (
    LOCAL_RANKS_VARIABLE,
    START_LIMIT,
    START_VARIABLE,
    STEP_LIMIT,
    read_limit,
)

USAGE = """\
usage: python -m libai.launch FILE CONFIG PROCS [--max-restarts N]
                              [key=value | --flag | ...]
FILE = your own program; every process gets --config-file CONFIG and the other
       arguments
PROCS = processes on this machine\
"""

# Addresses that grpc must not reach through a proxy. grpc compares the ends of names, so digits
# match all IP addresses.
NO_GRPC_PROXY = "0,1,2,3,4,5,6,7,8,9,localhost"


def choose_environment(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to add for the ranks.

    Existing settings of the user are kept.
    """
    extra = {}
    if is_clone():  # a folder of installed packages must not come before the standard library
        extra["PYTHONPATH"] = os.pathsep.join(
            [ROOT, *filter(None, [environment.get("PYTHONPATH")])]
        )
    if job.world_size > 1:
        # grpc would send all calls between ranks to a web proxy, which cannot reach the ranks
        extra["no_grpc_proxy"] = ",".join(
            filter(None, [environment.get("no_grpc_proxy"), NO_GRPC_PROXY, job.address])
        )
    if job.num_processes > 1 and "OMP_NUM_THREADS" not in environment:
        # Threads for matmuls. If the variable is unset, oneflow's launcher sets it to 1 and prints
        # a banner about it.
        extra["OMP_NUM_THREADS"] = str(max(1, openblas.usable_cores() // job.num_processes))
    return extra


# -------------------------------------------------------------------------------- the whole command


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    max_restarts, arguments = take_restarts(arguments, os.environ)
    if len(arguments) < 3:
        print(USAGE, file=sys.stderr)
        return EXIT_USER_MISTAKE
    runtime.hide_rendezvous_environment()  # this process is not a rank, even if a rank started it
    os.environ[START_VARIABLE] = str(time.time())
    for name in (START_LIMIT, STEP_LIMIT):
        read_limit(name, 0.0)  # the ranks read these limits; a mistake is reported once, here
    job = read_job(arguments, os.environ)
    _check_arguments(job)
    job.announce_start()
    return _start(job, max_restarts, new_port=None if os.environ.get("PORT") else find_free_port)


def _start(job: Job, max_restarts: int, new_port: Callable[[], int] | None) -> int:
    with guard.signals_handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop_before_start)):
        os.environ.update(choose_environment(job, os.environ))
        runtime.compile_kernels()
    return run_job(job, max_restarts, new_port)


def arguments_of_rank(arguments: Sequence[str]) -> argparse.Namespace | None:
    """Return the arguments that a command has written to a file for its ranks, `--given=FILE`, or
    None in a process that is not such a rank.

    Linux refuses an argument of more than 128 KiB, which a prompt may have.
    """
    given = [word for word in arguments if word.startswith("--given=")]
    if not given:
        return None
    text = Path(given[0].partition("=")[2]).read_text(encoding="utf-8")
    return argparse.Namespace(**json.loads(text))


def write_arguments(folder: Path, args: argparse.Namespace, /, **others: Any) -> str:
    """Write arguments for ranks to a file in `folder`, and return the word that names it."""
    file = folder / "arguments.json"
    file.write_text(json.dumps({**vars(args), **others}, default=str), encoding="utf-8")
    return f"--given={file}"


def run_on_one_machine(module: str, config: str, processes: int, words: Sequence[str]) -> int:
    """Run a module of libai on several processes of this machine and return the exit code."""
    check_cores(processes)
    runtime.hide_rendezvous_environment()
    job = Job(module, config, processes, tuple(words), 1, 0, LOOPBACK, find_free_port())
    return _start(job, 0, new_port=None)


def _check_arguments(job: Job) -> None:
    """Raise `UserError` for mistakes in the arguments of the training program, before any process
    starts.

    `--help` prints the help and ends this process.
    """
    if job.is_training:
        parse_args(["--config-file", job.config, *job.arguments], prog="libai train")


def be_rank(place: Place, config: str, arguments: Sequence[str]) -> int:
    """Train as one rank of a job that another launcher has started, and return the exit code.

    Only rank 0 prints mistakes in the arguments and in the config, which all ranks find.
    """
    restarts, words = take_restarts(arguments, {})
    if restarts:
        raise UserError(
            f"--max-restarts {restarts}: {place.launcher} starts the processes and must restart "
            "them."
        )
    port = choose_port(str(place.port), place.size, place.rank)
    job = Job(
        TRAINING, find_config(config), 1, tuple(words), place.size, place.rank, place.address, port
    )
    if place.rank == 0:
        _check_arguments(job)
        job.announce_start()
    here = replace(job, num_processes=place.local_size, num_nodes=place.size)
    os.environ.update(choose_environment(here, os.environ) | _rank_variables(place))
    runtime.compile_kernels()
    sys.argv = [sys.argv[0], "--config-file", job.config, *words]

    from libai.cli.train_net import main
    from libai.config import ConfigError

    try:
        return main()
    except ConfigError as error:
        # before the run is built, every rank finds the same mistakes
        if place.rank == 0 or getattr(error, "left_phase", None) is not None:
            raise
        return EXIT_USER_MISTAKE


def _rank_variables(place: Place) -> dict[str, str]:
    """Return the environment variables from which `import oneflow` and libai read the rank and the
    job's address.
    """
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        LOCAL_RANKS_VARIABLE: str(place.local_size),
    }
