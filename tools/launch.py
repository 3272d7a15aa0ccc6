"""Start the ranks of one job on this machine and see that they end together. Called by tools/train.sh.

    python tools/launch.py FILE CONFIG PROCS [arguments of FILE …]

`oneflow.distributed.launch` starts the ranks; this file decides what it is given and replaces its watch loop, which
leaves ranks behind (it kills only when it leads a process group, and one failed rank hangs the others). Standard
library only: oneflow itself is never imported in this process.

Environment: NODE (machines), NODE_RANK, ADDR, PORT of the first machine; LIBAI_STOP_TIMEOUT, the seconds that ranks
get to save and stop after a signal. Exit codes: 0 done, 1 failed, 2 user mistake, 75 stopped but resumable,
128 + signal when a signal ended ranks that could not save.
"""

import contextlib
import difflib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from libai import runtime  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402

EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_RESUMABLE = 75

# Several nodes cannot agree on a free port, so they share this one unless PORT says otherwise.
DEFAULT_PORT = 29500
# Below the range from which Linux hands out ports of outgoing connections, which could take ours at any moment.
FREE_PORTS = range(20000, 32000)

POLL_SECONDS = 0.05
# After a failure: the time for other ranks to report what they saw, then from SIGTERM to SIGKILL.
REPORT_SECONDS = 1.5
TERMINATE_SECONDS = 1.5
DEFAULT_STOP_SECONDS = 120.0

RANK_BOOTSTRAP = "import sys; from libai.runtime import run_script; run_script(sys.argv[1:])"


@dataclass(frozen=True)
class Job:
    """What to run on this machine. `file` and `config` are absolute paths; `arguments` go to the file unchanged."""

    file: str
    config: str
    num_processes: int
    arguments: tuple[str, ...]
    num_nodes: int
    node_rank: int
    address: str
    port: int

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


def run_preflight(job: Job) -> dict[str, object]:
    """Check config and overrides, and return what `libai.config.preflight.check` found out about the run.

    Runs in a forked child: configs import oneflow, whose threads and slow exit handlers the launcher does not want.
    What the child prints is shown only when the check fails, since every rank will print it again. Then this exits
    with the child's code.
    """
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.close(read_end)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            runtime.leave_at_once(runtime.run_guarded(lambda: _write_preflight(job, write_end)))
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 0:
            said.seek(0)
            sys.stderr.write(said.read().decode(errors="replace"))
            sys.exit(code if code > 0 else EXIT_FAILED)
    return json.loads(text)


def _write_preflight(job: Job, write_end: int) -> None:
    from libai.config.preflight import check

    facts = check(job.config, list(job.arguments), world_size=job.world_size)
    with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
        json.dump(facts, pipe)


def choose_environment(job: Job, environment: Mapping[str, str], facts: Mapping[str, object]) -> dict[str, str]:
    """Return the variables to add for the ranks: what makes oneflow fast here, unless the user has set it."""
    extra = {}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    extra["PYTHONPATH"] = os.pathsep.join(paths)
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


@dataclass
class Rank:
    """A started process of the job; it leads its own session, so signals reach it only through this launcher."""

    number: int
    process: subprocess.Popen
    end_time: float | None = None
    intended: int | None = None

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. What a rank noted counts for one aborted later."""
        return self.intended if self.was_aborted_leaving else self.process.returncode

    @property
    def was_aborted_leaving(self) -> bool:
        """Whether oneflow ended it after its work was done: its heartbeat aborts a rank that misses another."""
        return self.intended is not None and self.process.returncode in (-signal.SIGABRT, -signal.SIGSEGV)

    def send(self, signum: int) -> None:
        """Signal the rank and whatever it has started (loader workers)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


class _AllStarted(BaseException):
    """Leaves oneflow's launcher at the point where it would begin to watch."""


class _Unwatched:
    """What oneflow's launcher gets for each process that it starts."""

    def poll(self) -> None:
        raise _AllStarted


def start_ranks(job: Job, ranks: list[Rank]) -> None:
    """Start the processes of this machine through `oneflow.distributed.launch`; append each to `ranks` at once."""

    def start(command: list[str], env: dict[str, str], **_: object) -> _Unwatched:
        python, unbuffered, *script = command
        command = [python, unbuffered, "-c", RANK_BOOTSTRAP, str(os.getpid()), *script]
        ranks.append(Rank(int(env["RANK"]), subprocess.Popen(command, env=env, start_new_session=True)))
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


# ----------------------------------------------------------------------------------------------- until the end


@dataclass
class Supervisor:
    """Watches the ranks of this machine: passes signals on, ends all when one fails, and works out the exit code."""

    ranks: list[Rank] = field(default_factory=list)
    stop_seconds: float = DEFAULT_STOP_SECONDS
    notes_folder: str | None = None
    stop_signal: int | None = None
    _terminate_at: float | None = None
    _kill_at: float | None = None

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass Ctrl-C, SIGTERM, a closed terminal and Ctrl-Z on to the ranks while the block runs."""
        handlers = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop, signal.SIGHUP: self._stop}
        handlers[signal.SIGTSTP] = self._pause
        # what the caller ignores (nohup, a script's background job) stays ignored
        ours = {s: h for s, h in handlers.items() if signal.getsignal(s) is not signal.SIG_IGN}
        previous = {signum: signal.signal(signum, handler) for signum, handler in ours.items()}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self.stop_signal is not None:
            self._kill_at = time.monotonic()  # asked twice: now
            return
        # a closed terminal asks for the same as SIGTERM: save and stop
        self.stop_signal = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self._kill_at = time.monotonic() + self.stop_seconds
        for rank in self.ranks:
            rank.send(self.stop_signal)

    def _pause(self, signum: int, frame: FrameType | None) -> None:
        for rank in self.ranks:
            rank.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self.ranks:  # reached when the shell continues this process
            rank.send(signal.SIGCONT)

    def wait(self) -> None:
        """Return when no rank runs any more."""
        while not self._poll():
            now = time.monotonic()
            if self._kill_at is not None and now >= self._kill_at:
                self.end(signal.SIGKILL)
            elif self._terminate_at is not None and now >= self._terminate_at:
                self._terminate_at = None
                self.end(signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        if any(rank.code for rank in self.ranks):
            self.end(signal.SIGKILL)  # loader workers of ranks that could not tidy up

    def _poll(self) -> bool:
        """Note which ranks have ended, set the deadlines for the others, and return whether all have."""
        for rank in self.ranks:
            if rank.end_time is None and rank.process.poll() is not None:
                rank.end_time = time.time()
                if self.notes_folder is not None:
                    rank.intended = runtime.read_leaving(self.notes_folder).get(rank.number)
                if rank.code == EXIT_RESUMABLE:  # the others may still be writing their part of the checkpoint
                    self._set_deadlines(None, self.stop_seconds)
                elif rank.code != 0:
                    self._set_deadlines(REPORT_SECONDS, REPORT_SECONDS + TERMINATE_SECONDS)
        return all(rank.end_time is not None for rank in self.ranks)

    def _set_deadlines(self, terminate_in: float | None, kill_in: float) -> None:
        """Set when the ranks that still run are ended; an earlier deadline stays."""
        now = time.monotonic()
        if terminate_in is not None and self._terminate_at is None:
            self._terminate_at = now + terminate_in
        self._kill_at = min(now + kill_in, self._kill_at or float("inf"))

    def end(self, signum: int) -> None:
        """Signal every rank and what it has started."""
        for rank in self.ranks:
            rank.send(signum)

    def exit_code(self) -> int:
        """Return the code of the whole job on this machine."""
        codes = {rank.code for rank in self.ranks}
        if codes == {0}:
            return 0
        if codes <= {0, EXIT_RESUMABLE}:
            return EXIT_RESUMABLE
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        return EXIT_USER_MISTAKE if EXIT_USER_MISTAKE in codes else EXIT_FAILED


def describe_failure(ranks: Sequence[Rank], notes: Mapping[int, Mapping], code: int) -> str | None:
    """Return the line about the rank that failed first, or None when the user knows already.

    `notes`: rank → what `libai.runtime.guarded_main` left behind, with the time of the exception.
    """
    failed = [rank for rank in ranks if rank.code not in (0, EXIT_RESUMABLE)]
    if code == EXIT_USER_MISTAKE:
        failed = [rank for rank in failed if rank.code == EXIT_USER_MISTAKE]
    first = min(failed, key=lambda rank: notes.get(rank.number, {}).get("time", rank.end_time))
    note = notes.get(first.number)
    if code == EXIT_USER_MISTAKE:
        if any(rank.number == 0 for rank in failed) or note is None:
            return None  # rank 0 has printed it itself
        return f"error: rank {first.number}: {note['reason']}"
    assert first.code is not None
    if note is not None:
        why = f"{note['reason']} ({note['where']}), exit code {first.code}"
    elif first.code == -signal.SIGALRM:
        why = (
            f"it waited {runtime.connect_seconds():g} s for the other ranks. Are all machines running, with the same "
            "ADDR, PORT and PROCS? LIBAI_CONNECT_TIMEOUT=<seconds> waits longer"
        )
    elif first.code < 0:
        name = signal.Signals(-first.code).name
        why = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        why = f"exit code {first.code}"
    others = "" if len(ranks) == 1 else "; the other ranks were ended"
    return f"launch: rank {first.number} failed first: {why}{others}."


def read_notes(folder: str) -> dict[int, dict]:
    """Return the notes that failing ranks left in `folder`, by rank. A note cut short by a kill is left out."""
    notes = {}
    for path in Path(folder).glob("rank_*.json"):
        with contextlib.suppress(ValueError):
            note = json.loads(path.read_text(encoding="utf-8"))
            notes[note["rank"]] = note
    return notes


def launch(job: Job, stop_seconds: float) -> int:
    """Run the job's ranks of this machine to their end and return the exit code. None of them outlives the call."""
    with tempfile.TemporaryDirectory(prefix="libai-") as notes_folder:
        supervisor = Supervisor(stop_seconds=stop_seconds, notes_folder=notes_folder)
        os.environ[runtime.FAILURE_DIR_VARIABLE] = notes_folder
        os.environ[runtime.LOCAL_RANKS_VARIABLE] = str(job.num_processes)
        with supervisor.handling_signals():
            try:
                start_ranks(job, supervisor.ranks)
                supervisor.wait()
            except BaseException:
                supervisor.end(signal.SIGKILL)
                raise
        code = supervisor.exit_code()
        for rank in supervisor.ranks:
            if rank.was_aborted_leaving and rank.intended in (0, EXIT_RESUMABLE):
                name = signal.Signals(-rank.process.returncode).name
                print(
                    f"launch: rank {rank.number} had done its work (exit code {rank.intended}) when oneflow's exit "
                    f"ended it by {name}; nothing is lost.",
                    file=sys.stderr,
                )
        if code in (EXIT_FAILED, EXIT_USER_MISTAKE):
            line = describe_failure(supervisor.ranks, read_notes(notes_folder), code)
            if line is not None:
                print(line, file=sys.stderr)
    return code


def main(arguments: Sequence[str]) -> int:
    """Run one `tools/train.sh` command line and return its exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(read_usage())
        return 0
    if len(arguments) < 3:
        print(read_usage(), file=sys.stderr)
        return EXIT_USER_MISTAKE
    runtime.hide_rendezvous_environment()  # this process is no rank, even when started from one
    stop_seconds = runtime.read_seconds("LIBAI_STOP_TIMEOUT", DEFAULT_STOP_SECONDS)
    job = read_job(arguments, os.environ)
    facts = run_preflight(job) if job.file == str(ROOT / "tools" / "train_net.py") else {}
    os.environ.update(choose_environment(job, os.environ, facts))
    return launch(job, stop_seconds)


if __name__ == "__main__":
    runtime.guarded_main(lambda: main(sys.argv[1:]))
