"""Turn the command line and the environment into a `Job`, or into one clear error.

Uses only the standard library. libai/launch/job.py starts the job.
"""

import difflib
import os
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from libai.launch.job import TRAIN_NET, Job
from libai.utils.errors import UserError
from libai.utils.installation import ROOT as _ROOT
from libai.utils.installation import is_clone, shipped_config, shipped_configs

ROOT = Path(_ROOT)

# Several nodes cannot agree on a free port, so they share this one unless PORT is set.
DEFAULT_PORT = 29500
# More processes than this per core are a mistake. A few are always allowed, to test layouts.
PROCESSES_PER_CORE, MIN_PROCESSES_LIMIT = 8, 16
# Below the range that Linux uses for outgoing connections, which could take a port at any moment.
FREE_PORTS = range(20000, 32000)


def read_job(arguments: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Return the job described by three or more arguments and the environment.

    Raises `UserError` if it is invalid.
    """
    file, config, processes, *rest = arguments
    if not os.stat(os.curdir).st_nlink:
        raise UserError("the working directory was removed. Change to another one.")
    num_processes = _positive_int("PROCS", processes)
    check_cores(num_processes)
    file_path = file if is_own_module(file) else find_file("FILE", file)
    config_path = find_config(config)
    if config_path == str(TRAIN_NET):
        raise UserError(
            f"FILE={file} and CONFIG={config} are swapped. The order is FILE CONFIG PROCS."
        )
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
        port=choose_port(environment.get("PORT", ""), num_nodes, node_rank),
    )


def is_own_module(file: str) -> bool:
    """Return True if FILE is the module name of a libai program, such as `libai.cli.train_net`."""
    return (
        file.startswith("libai.") and ROOT.joinpath(*file.split(".")).with_suffix(".py").is_file()
    )


def find_config(config: str) -> str:
    """Return the absolute path of CONFIG, which is a file or the name of a shipped config."""
    shipped = None if os.path.isfile(config) else shipped_config(config)
    return shipped or find_file("CONFIG", config)


def find_file(name: str, path: str) -> str:
    """Return the absolute path of a file.

    It is looked up in the current folder and then in the repository.
    """
    folders = [os.getcwd(), *([_ROOT] if is_clone() else [])]
    shipped = [file.stem for file in Path(shipped_configs()).glob("*.py")]
    known = shipped if name == "CONFIG" else []
    for folder in folders:
        place = Path(folder, path)
        if os.path.isfile(place):  # False for a name that is too long
            return os.path.realpath(place)
        if os.path.exists(place):
            raise UserError(
                f"{name} is {path or 'empty'}, which is a folder or a pipe. Give a regular file, "
                "such as a run's config.yaml."
            )
        known += [str(Path(path).with_name(file.name)) for file in place.parent.glob("*.py")]
    near = difflib.get_close_matches(path, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Looked in {' and '.join(folders)}."
    raise UserError(f"{name} is {path[:200]}, and there is no such file. {hint}")


def _positive_int(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        meaning = "processes on this machine" if name == "PROCS" else "machines"
        raise UserError(
            f"{name} is {text!r}; it must be the number of {meaning}, a whole number of at least 1."
        )
    return int(text)


def check_cores(num_processes: int) -> None:
    """Raise `UserError` if this machine has too few cores for that many processes."""
    cores = len(os.sched_getaffinity(0))
    most = max(MIN_PROCESSES_LIMIT, PROCESSES_PER_CORE * cores)
    if num_processes > most:
        raise UserError(
            f"PROCS is {num_processes}, and this machine has {cores} core(s): more than {most} "
            f"processes would exhaust memory and run very slowly. Choose 1 to {most}."
        )


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
    if num_nodes > 1 and resolved.startswith("127."):
        raise UserError(
            f"NODE={num_nodes} with ADDR={address}: on every machine this address means that "
            "machine itself. Set ADDR to an address of the machine of NODE_RANK=0 that the others "
            "can reach. (Two nodes on one machine do not work, because oneflow 0.9.0 "
            "distinguishes processes of one address by LOCAL_RANK. Use NODE=1 and more PROCS.)"
        )
    if (node_rank == 0) != _can_bind(resolved, 0):
        found = "is not an address of this" if node_rank == 0 else "is an address of this same"
        raise UserError(
            f"NODE={num_nodes} and NODE_RANK={node_rank}, but ADDR={address} {found} machine. ADDR "
            "is the machine of NODE_RANK=0; do not set it if there is only one machine."
        )


def choose_port(text: str, num_nodes: int, node_rank: int) -> int:
    """Return the port in `text`, the value of the variable PORT, or a free or default port if
    `text` is empty.

    Raises `UserError` if the port is invalid or in use.
    """
    if not text and num_nodes == 1:
        return find_free_port()
    port = read_port(text) or DEFAULT_PORT
    if node_rank == 0 and not _can_bind("", port):
        raise UserError(
            f"PORT={port} is in use on this machine, or only root may use it. Choose another port "
            "on every machine; a job on one machine finds a free port if PORT is not set."
        )
    return port


def read_port(text: str) -> int | None:
    """Parse the value of PORT. Return None if it is empty."""
    if text and not (text.isdecimal() and 0 < int(text) < 65536):
        raise UserError(f"PORT is {text!r}; it must be a whole number from 1 to 65535.")
    return int(text) if text else None


def find_free_port() -> int:
    """Return a free port, chosen at random so that two jobs that start together rarely collide."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.choice(FREE_PORTS)
        if _can_bind("", port):
            return port
    raise UserError(
        f"no free port found between {FREE_PORTS.start} and {FREE_PORTS.stop}. Set PORT to one."
    )


def _can_bind(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # a port whose last connection is still in TIME_WAIT is free for a new listener
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
