"""Start the ranks of one job on this machine and see that they end together. Called by tools/train.sh.

    python tools/launch.py FILE CONFIG PROCS [arguments of FILE …]

`oneflow.distributed.launch` starts the ranks; this file decides what it is given and replaces its watch loop, which
leaves ranks behind (it kills only when it leads a process group, and one failed rank hangs the others). Standard
library only: oneflow itself is never imported in this process.

Environment: NODE (machines), NODE_RANK, ADDR, PORT of the first machine; MAX_RESTARTS; LIBAI_STOP_TIMEOUT, the seconds
that ranks get to save and stop after a signal; LIBAI_STALL_TIMEOUT, the seconds without progress that end a job.
Exit codes: 0 done, 1 failed, 2 user mistake, 75 stopped but resumable, 128 + signal when a signal ended ranks that
could not save.
"""

import contextlib
import difflib
import importlib.util
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN_NET = ROOT / "tools" / "train_net.py"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from launch_ranks import (  # noqa: E402
    DEFAULT_EXIT_SECONDS,
    DEFAULT_STALL_SECONDS,
    DEFAULT_STOP_SECONDS,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    EXIT_USER_MISTAKE,
    Rank,
    Supervisor,
    describe_failure,
    find_first_failure,
    read_notes,
)

from libai import runtime  # noqa: E402
from libai.utils import rank_notes  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402

# Several nodes cannot agree on a free port, so they share this one unless PORT says otherwise.
DEFAULT_PORT = 29500
# Below the range from which Linux hands out ports of outgoing connections, which could take ours at any moment.
FREE_PORTS = range(20000, 32000)

# Several machines: oneflow's heartbeat takes up to 13 s to tell the other ranks of a failure; then they are ended.
MULTI_NODE_RESTART_SECONDS = 20.0
# What grpc must not reach through a proxy: every numeric address, since it compares the ends of names.
NO_GRPC_PROXY = "0,1,2,3,4,5,6,7,8,9,localhost"

RANK_BOOTSTRAP = "import sys; from libai.runtime import run_script; run_script(sys.argv[1:])"


@dataclass(frozen=True)
class Job:
    """What to run on this machine. `file` and `config` are absolute paths; `arguments` go to the file unchanged.

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


def read_usage() -> str:
    """Return the three lines of usage at the top of tools/train.sh, which is what users call."""
    lines = (ROOT / "tools" / "train.sh").read_text(encoding="utf-8").splitlines()[1:4]
    return "\n".join(line.removeprefix("# ") for line in lines)


def read_job(arguments: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Return the job that three or more arguments and the environment ask for; `UserError` for what cannot be."""
    file, config, processes, *rest = arguments
    num_processes = _positive_int("PROCS", processes)
    num_nodes = _positive_int("NODE", environment.get("NODE", "1"))
    node_rank = _node_rank(environment, num_nodes)
    address = environment.get("ADDR") or "127.0.0.1"
    if num_nodes > 1:
        _check_address(address, num_nodes, node_rank)
    return Job(
        file=find_file("FILE", file),
        config=find_file("CONFIG", config),
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
        if (folder / path).is_file():
            return str((folder / path).resolve())
    folder = next((f for f in (Path.cwd(), ROOT) if (f / path).parent.is_dir()), ROOT)
    neighbours = {str(Path(path).with_name(p.name)) for p in (folder / path).parent.glob("*.py")}
    near = difflib.get_close_matches(path, neighbours, n=1)
    hint = f" Did you mean {near[0]}?" if near else f" Looked in {Path.cwd()} and {ROOT}."
    raise UserError(f"{name} is {path}, and there is no such file.{hint}")


def _positive_int(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        meaning = {"PROCS": "the number of processes on this machine", "NODE": "the number of machines"}[name]
        usage = f"\n{read_usage()}" if name == "PROCS" else ""
        raise UserError(f"{name} is {text!r}; it must be {meaning}, a whole number of at least 1.{usage}")
    return int(text)


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
    """Check config and overrides as tools/train_net.py does; what `libai.config.preflight.check` found out.

    A mistake is shown, and ends this process with its exit code.
    """
    code, found, said = _ask_preflight(lambda preflight: _check(preflight, job))
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
    """`(exit code, answer, what was printed)` of a forked child that asks the module `libai.config.preflight`.

    A child, since configs import oneflow, whose threads and slow exit handlers the launcher does not want. What it
    prints is kept back: every rank will print it again.
    """

    def answer(write_end: int) -> None:
        from libai.config import preflight

        with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
            json.dump(question(preflight), pipe)

    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.close(read_end)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            runtime.leave_at_once(runtime.run_guarded(lambda: answer(write_end)))
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, json.loads(text) if code == 0 else {}, said.read().decode(errors="replace")


def choose_environment(job: Job, environment: Mapping[str, str], facts: Mapping[str, object]) -> dict[str, str]:
    """Return the variables to add for the ranks: what makes oneflow fast here, unless the user has set it."""
    extra = {}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    extra["PYTHONPATH"] = os.pathsep.join(paths)
    if job.world_size > 1:
        # a proxy for web pages does not know the ranks, and grpc would send all their calls to it
        extra["no_grpc_proxy"] = ",".join(filter(None, [environment.get("no_grpc_proxy"), NO_GRPC_PROXY, job.address]))
    if job.num_processes > 1 and "OMP_NUM_THREADS" not in environment:
        extra["OMP_NUM_THREADS"] = "1"  # also keeps oneflow's launcher from printing a banner about it
    device = facts.get("device")
    if device != "cpu" and (warning := runtime.check_gpu()) is not None:
        if device == "cuda":
            raise UserError(warning)
        print(f"launch: {warning}", file=sys.stderr)
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
    if on_cpu and facts.get("graph_enabled") is False and "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD" not in environment:
        # the scheduler thread spins while a worker computes, so ranks steal each other's cores; graph mode gets slower
        extra["ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"] = "0"
    return extra


# ------------------------------------------------------------------------------------------- starting the ranks


class _AllStarted(BaseException):
    """Leaves oneflow's launcher at the point where it would begin to watch."""


class _Unwatched:
    """What oneflow's launcher gets for each process that it starts."""

    def poll(self) -> None:
        raise _AllStarted


def start_ranks(job: Job, ranks: list[Rank], output_folder: Path) -> None:
    """Start the processes of this machine through `oneflow.distributed.launch`; append each to `ranks` at once.

    Rank 0 writes to the terminal; the stderr of the others is appended to `output_folder`/rank_<number>.stderr, and so
    is in a run of tools/train_net.py their stdout. Other programs may have something to say on every rank.
    """

    def start(command: list[str], env: dict[str, str], **_: object) -> _Unwatched:
        python, unbuffered, *script = command
        command = [python, unbuffered, "-c", RANK_BOOTSTRAP, str(os.getpid()), *script]
        number = int(env["RANK"])
        if number == 0:
            ranks.append(Rank(number, subprocess.Popen(command, env=env, start_new_session=True)))
            return _Unwatched()
        path = output_folder / f"rank_{number}.stderr"
        with open(path, "ab") as file:
            stdout = file if job.output_dir is not None else None
            process = subprocess.Popen(command, env=env, start_new_session=True, stdout=stdout, stderr=file)
            ranks.append(Rank(number, process, stderr=path, stderr_start=file.tell()))
        return _Unwatched()

    launcher = _load_oneflow_launcher()
    launcher.subprocess = SimpleNamespace(Popen=start)  # type: ignore[attr-defined]
    launcher.signal = SimpleNamespace(  # type: ignore[attr-defined]
        signal=lambda *_: None, SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM
    )
    arguments = {
        "--nnodes": job.num_nodes,
        "--node_rank": job.node_rank,
        "--nproc_per_node": job.num_processes,
        "--master_addr": job.address,
        "--master_port": job.port,
    }
    options = [str(word) for option in arguments.items() for word in option]
    sys.argv = ["oneflow.distributed.launch", *options, job.file, "--config-file", job.config, *job.arguments]
    with contextlib.suppress(_AllStarted):
        launcher.main()


def _load_oneflow_launcher() -> ModuleType:
    """Load `oneflow.distributed.launch` from its file: it needs nothing of the package, whose import takes 0.5 s."""
    package = importlib.util.find_spec("oneflow")
    if package is None or not package.submodule_search_locations:
        missing = ModuleNotFoundError("No module named 'oneflow'", name="oneflow")
        raise UserError(runtime.explain_import_error(missing))
    path = Path(package.submodule_search_locations[0], "distributed", "launch.py")
    spec = importlib.util.spec_from_file_location("oneflow.distributed.launch", path)
    if spec is None or spec.loader is None:
        raise UserError(f"oneflow in {path.parent.parent} has no distributed/launch.py; oneflow==0.9.0 is needed.")
    launcher = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launcher)
    return launcher


# ---------------------------------------------------------------------------------------- until the job's end


@dataclass(frozen=True)
class Limits:
    """Seconds to save and stop after a signal, without progress (0: for ever) and to exit; restarts after failures."""

    stop_seconds: float = DEFAULT_STOP_SECONDS
    stall_seconds: float = 0.0
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
    with tempfile.TemporaryDirectory(prefix="libai-") as notes_folder:
        supervisor = Supervisor(
            stop_seconds=limits.stop_seconds,
            stall_seconds=limits.stall_seconds,
            exit_seconds=limits.exit_seconds,
            notes_folder=notes_folder,
        )
        os.environ[rank_notes.FAILURE_DIR_VARIABLE] = notes_folder
        os.environ[rank_notes.LOCAL_RANKS_VARIABLE] = str(job.num_processes)
        with supervisor.handling_signals():
            try:
                start_ranks(job, supervisor.ranks, _output_folder(job, notes_folder))
                supervisor.wait()
            except BaseException:
                supervisor.end(signal.SIGKILL)
                raise
        code = supervisor.exit_code()
        failure = _report_end(supervisor, job, notes_folder, code)
    return Outcome(code, supervisor.stop_signal is not None, failure)


def _report_end(supervisor: Supervisor, job: Job, notes_folder: str, code: int) -> tuple[str, int] | None:
    """Say what the user cannot know yet about the end of the ranks; returns `Outcome.failure`."""
    for rank in supervisor.ranks:
        if rank.was_aborted_leaving and rank.intended in (0, EXIT_RESUMABLE):
            name = signal.Signals(-rank.process.returncode).name
            how = "did not let it end" if rank.was_stuck_leaving else f"ended it by {name}"
            print(
                f"launch: rank {rank.number} had done its work (exit code {rank.intended}) when oneflow's exit "
                f"{how}; nothing is lost.",
                file=sys.stderr,
            )
    if code not in (EXIT_FAILED, EXIT_USER_MISTAKE) or supervisor.has_stalled:
        return None
    notes = read_notes(notes_folder)
    first = find_first_failure(supervisor.ranks, notes, code)
    if code == EXIT_FAILED:
        said = rank_notes.read_held_back(notes_folder) if first.number == 0 else first.read_stderr()
        sys.stderr.write(said)
    line = describe_failure(supervisor.ranks, notes, code, job.num_nodes)
    if line is not None:
        print(line, file=sys.stderr, flush=True)
    note = notes.get(first.number, {})
    return None if note.get("iteration") is None else (note["kind"], note["iteration"])


def _output_folder(job: Job, notes_folder: str) -> Path:
    """Where ranks above 0 print: the job's output folder, where one is known and can be written."""
    if job.output_dir is not None:
        with contextlib.suppress(OSError):
            job.output_dir.mkdir(parents=True, exist_ok=True)
            if os.access(job.output_dir, os.W_OK):
                return job.output_dir
    return Path(notes_folder)


def run(job: Job, limits: Limits, port_is_fixed: bool) -> int:
    """Run the job, again after a failure while restarts are left, and return its exit code.

    Not started again: what was stopped, a user's mistake, and a failure of the same kind in the same iteration.
    """
    before = _checkpoints(job)
    restarts_left, last_failure = limits.max_restarts, None
    while True:
        outcome = launch(job, limits)
        if outcome.code in (0, EXIT_USER_MISTAKE, EXIT_RESUMABLE) or outcome.was_stopped or not limits.max_restarts:
            return outcome.code
        if outcome.failure is not None and outcome.failure == last_failure:
            kind, iteration = outcome.failure
            print(f"launch: {kind} in iteration {iteration} came again: not started again.", file=sys.stderr)
            return outcome.code
        if restarts_left == 0:
            print(f"launch: failed after {limits.max_restarts} restarts: not started again.", file=sys.stderr)
            return outcome.code
        restarts_left, last_failure = restarts_left - 1, outcome.failure
        if job.num_nodes > 1:
            time.sleep(MULTI_NODE_RESTART_SECONDS)
        elif not port_is_fixed:
            job = replace(job, port=find_free_port())
        # those of an earlier run must not be taken, unless it was to be resumed anyway
        new = _checkpoints(job) - (set() if "--resume" in job.arguments else before)
        if new and "--resume" not in job.arguments:
            job = replace(job, arguments=(*job.arguments, "--resume"))
        start = (
            f"from {max(new)[0]}" if new else "with --resume" if "--resume" in job.arguments else "from the beginning"
        )
        print(f"launch: starting again {start}; {restarts_left} restarts left.", file=sys.stderr, flush=True)


def _checkpoints(job: Job) -> set[tuple[str, int]]:
    """Return name and time of every checkpoint in the job's output folder."""
    if job.output_dir is None:
        return set()
    return {(path.name, path.stat().st_mtime_ns) for path in (job.output_dir / "checkpoints").glob("iter_*")}


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


def read_stall_seconds(environment: Mapping[str, str]) -> float:
    """Return LIBAI_STALL_TIMEOUT: seconds without progress after which a job is ended, 0 for never."""
    text = environment.get("LIBAI_STALL_TIMEOUT", "")
    with contextlib.suppress(ValueError):
        seconds = float(text or DEFAULT_STALL_SECONDS)
        if 0 <= seconds < float("inf"):
            return seconds
    raise UserError(f"LIBAI_STALL_TIMEOUT is {text!r}; it must be a number of seconds, or 0 to wait for ever.")


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
        read_stall_seconds(os.environ),
        max_restarts,
        runtime.read_seconds("LIBAI_EXIT_TIMEOUT", DEFAULT_EXIT_SECONDS),
    )
    job = read_job(arguments, os.environ)
    facts = run_preflight(job) if job.file == str(TRAIN_NET) else look_at_config(job)
    if "output_dir" in facts and not {"--print-config", "--support"} & set(job.arguments):
        job = replace(job, output_dir=Path(str(facts["output_dir"])).absolute())
    os.environ.update(choose_environment(job, os.environ, facts))
    return run(job, limits, port_is_fixed=bool(os.environ.get("PORT")))


if __name__ == "__main__":
    runtime.guarded_main(lambda: main(sys.argv[1:]))
