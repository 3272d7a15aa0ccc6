"""Start the ranks of one job on this machine and see that they end together. Called by tools/train.sh.

    python tools/launch.py FILE CONFIG PROCS [arguments of FILE …]

This file reads what was asked for and checks it; libai/launch/job.py starts the ranks, libai/launch/ranks.py sees to
them. Standard library only: oneflow itself is never imported in this process.

Environment: NODE (machines), NODE_RANK, ADDR, PORT of the first machine; MAX_RESTARTS; LIBAI_STOP_TIMEOUT, the seconds
that ranks get to save and stop after a signal; LIBAI_STALL_TIMEOUT, the seconds without progress that end a job, and
LIBAI_STALL_TIMEOUT_BUILD and so on for single phases.
Exit codes: 0 done, 1 failed, 2 user mistake, 75 stopped but resumable, 128 + signal when a signal ended ranks that
could not save.
"""

import difflib
import json
import os
import random
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN_NET = ROOT / "tools" / "train_net.py"
sys.path.insert(0, str(ROOT))

from libai.launch import auto as launch_auto  # noqa: E402
from libai.launch import guard, runtime  # noqa: E402
from libai.launch.job import Job, Limits, run  # noqa: E402
from libai.launch.ranks import DEFAULT_EXIT_SECONDS, DEFAULT_STOP_SECONDS  # noqa: E402
from libai.launch.watch import read_stall_limits  # noqa: E402
from libai.native import kernels  # noqa: E402
from libai.oneflow_fixes import openblas  # noqa: E402
from libai.utils import gpu  # noqa: E402
from libai.utils.errors import EXIT_FAILED, EXIT_USER_MISTAKE, UserError  # noqa: E402

# Several nodes cannot agree on a free port, so they share this one unless PORT says otherwise.
DEFAULT_PORT = 29500
# More processes than this for each core are a mistake, but a few for tests of layouts are not.
PROCESSES_PER_CORE, MIN_PROCESSES_LIMIT = 8, 16
# Below the range from which Linux hands out ports of outgoing connections, which could take ours at any moment.
FREE_PORTS = range(20000, 32000)

# What grpc must not reach through a proxy: every numeric address, since it compares the ends of names.
NO_GRPC_PROXY = "0,1,2,3,4,5,6,7,8,9,localhost"
# With these tools/train_net.py writes nothing into the output folder.
WRITES_NOTHING = {"--print-config", "--support", "--dry-run", "--eval-only"}


def read_usage() -> str:
    """Return the three lines of usage at the top of tools/train.sh, which is what users call."""
    lines = (ROOT / "tools" / "train.sh").read_text(encoding="utf-8").splitlines()[1:4]
    return "\n".join(line.removeprefix("# ") for line in lines)


def read_job(arguments: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Return the job that three or more arguments and the environment ask for; `UserError` for what cannot be."""
    file, config, processes, *rest = arguments
    num_processes = _positive_int("PROCS", processes)
    rest = _check_oversubscription(num_processes, rest)
    file_path, config_path = find_file("FILE", file), find_file("CONFIG", config)
    if config_path == str(TRAIN_NET):
        raise UserError(f"FILE is {file} and CONFIG is {config}: they are swapped. The order is FILE CONFIG PROCS.")
    num_nodes = _positive_int("NODE", environment.get("NODE", "1"))
    node_rank = _node_rank(environment, num_nodes)
    address = environment.get("ADDR") or "127.0.0.1"
    if num_nodes > 1 or environment.get("ADDR"):
        _check_address(address, num_nodes, node_rank)
    return Job(
        file=file_path,
        config=config_path,
        num_processes=num_processes,
        arguments=tuple(rest),
        num_nodes=num_nodes,
        node_rank=node_rank,
        address=address,
        port=_choose_port(environment.get("PORT", ""), num_nodes, node_rank),
    )


def find_file(name: str, path: str) -> str:
    """Return the absolute path of a file given relative to the current folder or, failing that, to the repository."""
    for folder in (Path.cwd(), ROOT):
        if _is_file(folder / path):
            return str((folder / path).resolve())
    if len(path) > 255 or not path:
        raise UserError(f"{name} is {path[:60]!r}{'...' if path else ''}, which is no name of a file.")
    for folder in (Path.cwd(), ROOT):
        if (folder / path).is_dir():
            files = sorted(file.name for file in (folder / path).glob("*.py"))[:5]
            inside = f" In it are {', '.join(files)}." if files else ""
            raise UserError(f"{name} is {path}, which is a folder. Name a file in it.{inside}")
    folder = next((f for f in (Path.cwd(), ROOT) if (f / path).parent.is_dir()), ROOT)
    neighbours = {str(Path(path).with_name(p.name)) for p in (folder / path).parent.glob("*.py")}
    near = difflib.get_close_matches(path, neighbours, n=1)
    hint = f" Did you mean {near[0]}?" if near else f" Looked in {Path.cwd()} and {ROOT}."
    raise UserError(f"{name} is {path}, and there is no such file.{hint}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a null byte
        return False


def _positive_int(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        meaning = {"PROCS": "the number of processes on this machine", "NODE": "the number of machines"}[name]
        auto = ", or auto" if name == "PROCS" else ""
        order = " The order is FILE CONFIG PROCS." if name == "PROCS" else ""
        raise UserError(f"{name} is {text!r}; it must be {meaning}, a whole number of at least 1{auto}.{order}")
    return int(text)


def _check_oversubscription(num_processes: int, arguments: Sequence[str]) -> list[str]:
    """The arguments without `--oversubscribe`; `UserError` for too many processes without it."""
    cores = len(os.sched_getaffinity(0))
    most = max(MIN_PROCESSES_LIMIT, PROCESSES_PER_CORE * cores)
    if num_processes > most and "--oversubscribe" not in arguments:
        raise UserError(
            f"PROCS is {num_processes}, and this machine has {cores} core{'s' if cores > 1 else ''}: more than {most} "
            f"processes would take its memory and hardly run. Choose 1 to {most}, or add --oversubscribe."
        )
    return [argument for argument in arguments if argument != "--oversubscribe"]


def _node_rank(environment: Mapping[str, str], num_nodes: int) -> int:
    text = environment.get("NODE_RANK", "" if num_nodes > 1 else "0")
    if not text.isdecimal() or int(text) >= num_nodes:
        raise UserError(
            f"NODE={num_nodes} and NODE_RANK={text!r}: each machine needs its own number, "
            f"0 (the one at ADDR) to {num_nodes - 1}."
        )
    return int(text)


def _check_address(address: str, num_nodes: int, node_rank: int) -> None:
    try:
        resolved = socket.gethostbyname(address)
    except OSError as error:
        raise UserError(
            f"ADDR={address} cannot be resolved ({error}). It must name the machine of NODE_RANK=0."
        ) from None
    if num_nodes == 1:
        if not _can_bind(resolved, 0):
            raise UserError(
                f"ADDR={address} is not an address of this machine, and with NODE=1 all processes run here. Leave ADDR "
                "out, or set NODE to the number of machines."
            )
        return
    if resolved.startswith("127."):
        raise UserError(
            f"NODE={num_nodes} with ADDR={address}: that is every machine's own address. Set ADDR to an address of the "
            "machine of NODE_RANK=0 that the others can reach. (Two nodes on one machine cannot work: oneflow 0.9.0 "
            "tells processes of one address apart by LOCAL_RANK. Use NODE=1 and more PROCS.)"
        )
    if (node_rank == 0) != _can_bind(resolved, 0):
        found = "is not an address of this machine" if node_rank == 0 else "is an address of this same machine"
        raise UserError(f"NODE_RANK={node_rank}, but ADDR={address} {found}. ADDR names the machine of NODE_RANK=0.")


def _choose_port(text: str, num_nodes: int, node_rank: int) -> int:
    if not text and num_nodes == 1:
        return find_free_port()
    if text and not (text.isdecimal() and 0 < int(text) < 65536):
        raise UserError(f"PORT is {text!r}; it must be a whole number from 1 to 65535.")
    port = int(text or DEFAULT_PORT)
    if node_rank == 0 and not _can_bind("", port):
        rest = " (or unset it: a free one is found)" if num_nodes == 1 else " on every machine"
        raise UserError(f"PORT={port} is in use on this machine. Choose another{rest}.")
    return port


def find_free_port() -> int:
    """Return a port nobody listens at. Drawn at random, so that two jobs that start together rarely collide."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.choice(FREE_PORTS)
        if _can_bind("", port):
            return port
    raise UserError(f"no free port found between {FREE_PORTS.start} and {FREE_PORTS.stop}. Set PORT to one.")


def _can_bind(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # a port whose last connection is still in TIME_WAIT is free for a new listener
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


# ------------------------------------------------------------------------------- what is known before the start


def run_preflight(job: Job) -> dict[str, Any]:
    """Check config and overrides as tools/train_net.py does; what `libai.config.arguments.check` found out.

    A mistake is shown, and ends this process with its exit code.
    """
    code, found, said = _ask_preflight(lambda preflight: _check(preflight, job))
    if code == 0 and not found:  # --help
        print(said, end="")
        sys.exit(0)
    if code != 0:
        sys.stderr.write(said)
        sys.exit(code if code > 0 else EXIT_FAILED)
    return found


def look_at_config(job: Job) -> dict[str, Any]:
    """What can be known before a FILE of the user's own runs, which may use CONFIG and arguments as it likes."""
    return _ask_preflight(lambda preflight: preflight.look(job.config, list(job.arguments)))[1]


def _check(preflight: ModuleType, job: Job) -> dict[str, Any]:
    own_flags = runpy.run_path(str(TRAIN_NET))["FLAGS"]
    return preflight.check(job.config, list(job.arguments), world_size=job.world_size, extra_flags=own_flags)


def _ask_preflight(question: Callable[[ModuleType], dict[str, Any]]) -> tuple[int, dict[str, Any], str]:
    """`(exit code, answer, what was printed)` of a forked child that asks the module `libai.config.arguments`.

    A child, since configs import oneflow, whose threads and slow exit handlers the launcher does not want. What it
    prints is kept back: every rank will print it again.
    """

    def answer(write_end: int) -> None:
        from libai.config import arguments

        with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
            json.dump(question(arguments), pipe)

    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.close(read_end)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            guard.leave_at_once(guard.run_guarded(lambda: answer(write_end)))
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, json.loads(text) if code == 0 and text else {}, said.read().decode(errors="replace")


def choose_environment(job: Job, environment: Mapping[str, str], facts: Mapping[str, object]) -> dict[str, str]:
    """Return the variables to add for the ranks: what makes oneflow fast here, unless the user has set it."""
    extra = {}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    extra["PYTHONPATH"] = os.pathsep.join(paths)
    if job.world_size > 1:
        # a proxy for web pages does not know the ranks, and grpc would send all their calls to it
        extra["no_grpc_proxy"] = ",".join(filter(None, [environment.get("no_grpc_proxy"), NO_GRPC_PROXY, job.address]))
    if job.num_processes > 1 and "OMP_NUM_THREADS" not in environment:
        # for matrix products; also keeps oneflow's launcher from setting 1, with a banner about it
        extra["OMP_NUM_THREADS"] = str(max(1, openblas.usable_cores() // job.num_processes))
    device = facts.get("device")
    if device != "cpu" and (warning := gpu.check_gpu()) is not None:
        if device == "cuda":
            raise UserError(warning)
        print(f"launch: {warning}", file=sys.stderr)
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
    if on_cpu and facts.get("graph_enabled") is False and "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD" not in environment:
        # the scheduler thread spins while a worker computes, so ranks steal each other's cores; graph mode gets slower
        extra["ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"] = "0"
    return extra


# ------------------------------------------------------------------------------------------- the whole command


def take_max_restarts(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Return the number of restarts (`--max-restarts N`, else MAX_RESTARTS, else 0) and the other arguments."""
    name, text = "MAX_RESTARTS", environment.get("MAX_RESTARTS") or "0"
    words, rest = list(arguments), []
    while words:
        word = words.pop(0)
        if word == "--max-restarts":
            name, text = word, words.pop(0) if words else ""
        elif word.startswith("--max-restarts="):
            name, text = "--max-restarts", word.partition("=")[2]
        else:
            rest.append(word)
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r}; it must be how often a failed job is started again, a whole number.")
    return int(text), rest


def settle_processes(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments with a number in place of PROCS=auto; `UserError` where it cannot be measured."""
    file, config, _, *rest = arguments
    alone = [file, config, "1", *rest]
    job = read_job(alone, environment)
    if job.file != str(TRAIN_NET) or job.num_nodes > 1:
        why = f"NODE={job.num_nodes}" if job.num_nodes > 1 else f"FILE is {file}"
        raise UserError(f"PROCS=auto measures tools/train_net.py on one machine, and {why}. Name a number.")
    facts = run_preflight(job)
    if WRITES_NOTHING & set(rest):  # there is no training to be fast
        return alone
    return launch_auto.settle(arguments, facts, openblas.usable_cores(), launch_auto.measure_in_child)


def main(arguments: Sequence[str]) -> int:
    """Run one `tools/train.sh` command line and return its exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(read_usage())
        return 0
    max_restarts, arguments = take_max_restarts(arguments, os.environ)
    if len(arguments) < 3:
        print(read_usage(), file=sys.stderr)
        return EXIT_USER_MISTAKE
    runtime.hide_rendezvous_environment()  # this process is no rank, even when started from one
    limits = Limits(
        runtime.read_seconds("LIBAI_STOP_TIMEOUT", DEFAULT_STOP_SECONDS),
        read_stall_limits(os.environ),
        max_restarts,
        runtime.read_seconds("LIBAI_EXIT_TIMEOUT", DEFAULT_EXIT_SECONDS),
    )
    runtime.connect_seconds()  # the ranks read it; a mistake in it is told once, here
    if arguments[2] == "auto":
        arguments = settle_processes(arguments, os.environ)
    job = read_job(arguments, os.environ)
    facts = run_preflight(job) if job.file == str(TRAIN_NET) else look_at_config(job)
    if "output_dir" in facts and not WRITES_NOTHING & set(job.arguments):
        job = replace(job, output_dir=Path(str(facts["output_dir"])).absolute())
    os.environ.update(choose_environment(job, os.environ, facts))
    kernels.compile_kernels()
    return run(job, limits, new_port=None if os.environ.get("PORT") else find_free_port)


if __name__ == "__main__":
    guard.guarded_main(lambda: main(sys.argv[1:]))
