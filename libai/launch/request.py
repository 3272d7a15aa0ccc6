"""What was asked for, on the command line and in the environment, as a `Job`; one clear error for what cannot be.

Standard library only. Not here: starting the job (libai/launch/job.py), mistakes in the config (libai/cli/launch.py).
"""

import difflib
import os
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from libai.launch.installation import ROOT as _ROOT
from libai.launch.installation import is_clone, shipped_config, shipped_configs
from libai.launch.job import TRAIN_NET, Job
from libai.utils.errors import UserError

ROOT = Path(_ROOT)

# Several nodes cannot agree on a free port, so they share this one unless PORT says otherwise.
DEFAULT_PORT = 29500
# More processes than this for each core are a mistake, but a few for tests of layouts are not.
PROCESSES_PER_CORE, MIN_PROCESSES_LIMIT = 8, 16
# Below the range from which Linux hands out ports of outgoing connections, which could take ours at any moment.
FREE_PORTS = range(20000, 32000)


def read_job(arguments: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Return the job that three or more arguments and the environment ask for; `UserError` for what cannot be."""
    file, config, processes, *rest = arguments
    num_processes = _positive_int("PROCS", processes)
    rest = _check_oversubscription(num_processes, rest)
    file_path = file if is_own_module(file) else find_file("FILE", file)
    config_path = find_config(config)
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
        port=choose_port(environment.get("PORT", ""), num_nodes, node_rank),
    )


def is_own_module(file: str) -> bool:
    """Whether FILE is a program of libai by its module's name, such as `libai.cli.train_net`."""
    return file.startswith("libai.") and ROOT.joinpath(*file.split(".")).with_suffix(".py").is_file()


def find_config(config: str) -> str:
    """The absolute path of CONFIG: a file, or one of the shipped configs by its name alone."""
    shipped = None if is_file(Path(config)) else shipped_config(config)
    return shipped or find_file("CONFIG", config)


def find_file(name: str, path: str) -> str:
    """Return the absolute path of a file given relative to the current folder or, failing that, to the repository."""
    looked_in = [Path.cwd(), *([ROOT] if is_clone() else [])]
    for folder in looked_in:
        if is_file(folder / path):
            return str((folder / path).resolve())
    if len(path) > 255 or not path:
        raise UserError(f"{name} is {path[:60]!r}{'...' if path else ''}, which is no name of a file.")
    for folder in looked_in:
        if (folder / path).is_dir():
            files = sorted(file.name for file in (folder / path).glob("*.py"))[:5]
            inside = f" In it are {', '.join(files)}." if files else ""
            raise UserError(f"{name} is {path}, which is a folder. Name a file in it.{inside}")
    folder = next((f for f in looked_in if (f / path).parent.is_dir()), ROOT)
    neighbours = {str(Path(path).with_name(p.name)) for p in (folder / path).parent.glob("*.py")}
    shipped = {file.stem for file in Path(shipped_configs()).glob("*.py")} if name == "CONFIG" else set()
    near = difflib.get_close_matches(path, neighbours | shipped, n=1)
    hint = f" Did you mean {near[0]}?" if near else f" Looked in {' and '.join(map(str, looked_in))}."
    raise UserError(f"{name} is {path}, and there is no such file.{hint}")


def is_file(path: Path) -> bool:
    """Whether there is such a file; also for what cannot be the name of one."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a null byte
        return False


def _positive_int(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        meaning = {"PROCS": "the number of processes on this machine", "NODE": "the number of machines"}[name]
        order = " The order is FILE CONFIG PROCS." if name == "PROCS" else ""
        raise UserError(f"{name} is {text!r}; it must be {meaning}, a whole number of at least 1.{order}")
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


def choose_port(text: str, num_nodes: int, node_rank: int) -> int:
    """The port that the variable PORT asks for, else a free one; `UserError` for one that cannot be had."""
    if not text and num_nodes == 1:
        return find_free_port()
    port = read_port(text) or DEFAULT_PORT
    if node_rank == 0 and not _can_bind("", port):
        rest = " (or unset it: a free one is found)" if num_nodes == 1 else " on every machine"
        raise UserError(f"PORT={port} is in use on this machine. Choose another{rest}.")
    return port


def read_port(text: str) -> int | None:
    """The number that the variable PORT holds, None where it is empty."""
    if text and not (text.isdecimal() and 0 < int(text) < 65536):
        raise UserError(f"PORT is {text!r}; it must be a whole number from 1 to 65535.")
    return int(text) if text else None


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
