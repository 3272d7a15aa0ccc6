"""Start the ranks of one job on this machine and make sure that they end together.

    python -m libai.launch FILE CONFIG PROCS [arguments of FILE …]

libai/launch/request.py reads the request, libai/launch/job.py starts the ranks, and
libai/launch/supervisor.py watches them. Uses only the standard library and never imports oneflow.
The config, which may import it, is checked in a separate process.

Environment: NODE is the number of machines and NODE_RANK the index of this machine, from 0. ADDR
and PORT belong to the first machine. MAX_RESTARTS is the number of restarts. LIBAI_START_TIMEOUT
and LIBAI_STEP_TIMEOUT are the seconds without progress after which a job is ended, before and after
its first iteration. Exit codes: 0 done, 1 failed, 2 user mistake, 75 stopped but resumable, 128 +
signal if a signal ended ranks that could not save.
"""

import faulthandler
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from libai.launch import guard, runtime
from libai.launch.external import Place
from libai.launch.job import TRAINING, Job, run_job
from libai.launch.rank import end_with_parent
from libai.launch.request import choose_port, find_config, find_free_port, read_job, take_restarts
from libai.launch.supervisor import SLOW_SECONDS
from libai.patches import openblas
from libai.utils.errors import EXIT_FAILED, EXIT_USER_MISTAKE, UserError
from libai.utils.installation import ROOT, is_clone
from libai.utils.rank_notes import (
    DEFAULT_START_SECONDS,
    LOCAL_RANKS_VARIABLE,
    START_LIMIT,
    START_VARIABLE,
    STEP_LIMIT,
    read_limit,
)
from libai.utils.screen import say, say_error

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
# Flags with which the training program writes nothing to the output folder.
WRITES_NOTHING = {"--print-config", "--dry-run", "--eval-only", "--find-lr"}
# If the check hangs or crashes, its stack is shown without the lines that contain these parts (not
# the user's code).
NOT_SHOWN = (*guard.NOT_USERS, "Extension modules: ")


def check_config(job: Job, tells: bool = True) -> Path:
    """Check config and overrides as the training program does, and return its output folder.

    The check runs in a forked child. Configs import oneflow, and the launcher must avoid oneflow's
    threads and slow exit handlers. The child's output is held back because every rank will print it
    again. If the check finds a mistake, this process exits with the check's exit code, and prints
    the message if `tells` is true. `--help` also ends this process. A check that hangs is ended
    after LIBAI_START_TIMEOUT. The stack of a check that hangs or crashes is shown.
    """
    limit = read_limit(START_LIMIT, DEFAULT_START_SECONDS)
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as said:
        parent, child = os.getpid(), os.fork()
        if child == 0:
            end_with_parent(parent)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.argv = [
                word for word in sys.argv if word != "--json"
            ]  # this process prints the error
            faulthandler.enable()
            if limit:
                faulthandler.dump_traceback_later(limit, exit=True)
            code = guard.run_guarded(lambda: _write_output_dir(job, write_end))
            os.write(write_end, b"\n")  # missing if the check hangs or crashes
            guard.leave_at_once(code)
        os.close(write_end)
        if not select.select([read_end], [], [], SLOW_SECONDS)[0] and tells:
            job.announce("checking the config, which imports oneflow")
        answer = os.read(read_end, 65536).decode()
        os.close(read_end)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        text = said.read().decode(errors="replace")
    if output_dir := answer.strip("\n"):
        return Path(output_dir).absolute()
    if not answer:
        end = signal.Signals(-code).name if code < 0 else f"os._exit({code})"
        reason = f"was ended by {end}. Correct the config or what it imports"
        if "Timeout (" in text:
            reason = f"took longer than {limit:g} s. {START_LIMIT}=<seconds> waits longer"
        lines = [line for line in text.splitlines() if not any(part in line for part in NOT_SHOWN)]
        text = f"error: checking the config {reason}.\n" + "\n".join(lines)
        code = EXIT_FAILED
    if code == 0:  # --help
        print(text if tells else "", end="")
    elif tells and text:
        say_error(text.removesuffix("\n"), code)
    sys.exit(code)


def _write_output_dir(job: Job, descriptor: int) -> None:
    from libai.config.arguments import check

    os.write(descriptor, check(job.config, job.arguments, job.world_size).encode())


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
    job.announce_start()
    with guard.signals_handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), _stop_before_start)):
        # A single rank checks the config itself. Several ranks would only find a typo after their
        # rendezvous.
        if job.is_training and (job.world_size > 1 or max_restarts):
            output_dir = check_config(job)
            if WRITES_NOTHING.isdisjoint(word.partition("=")[0] for word in job.arguments):
                job = replace(job, output_dir=output_dir)
        os.environ.update(choose_environment(job, os.environ))
        runtime.compile_kernels()
    return run_job(job, max_restarts, new_port=None if os.environ.get("PORT") else find_free_port)


def _stop_before_start(signum: int, frame: object) -> None:
    say(guard.NOT_BEGUN)
    sys.exit(128 + signum)


def be_rank(place: Place, config: str, arguments: Sequence[str]) -> int:
    """Train as one rank of a job that another launcher has started, and return the exit code.

    Every rank checks the config before the rendezvous. Only rank 0 prints mistakes.
    """
    restarts, words = take_restarts(arguments, {})
    if restarts:
        raise UserError(
            f"--max-restarts {restarts}: {place.launcher} starts the processes and must restart "
            "them."
        )
    runtime.hide_rendezvous_environment()  # the config check must not wait for other ranks
    port = choose_port(str(place.port), place.size, place.rank)
    job = Job(
        TRAINING, find_config(config), 1, tuple(words), place.size, place.rank, place.address, port
    )
    if place.rank == 0:
        job.announce_start()
    check_config(job, tells=place.rank == 0)
    here = replace(job, num_processes=place.local_size, num_nodes=place.size)
    os.environ.update(choose_environment(here, os.environ) | _rank_variables(place))
    runtime.compile_kernels()
    sys.argv = [sys.argv[0], "--config-file", job.config, *words]

    from libai.cli.train_net import main

    return main()


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
