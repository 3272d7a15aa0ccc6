"""Make `import oneflow` work, and make a process of a job die properly. Standard library only.

`libai/__init__.py` calls `prepare_environment` before anything imports oneflow; `tools/launch.py` starts every rank
through `run_script`, which guards it with `guarded_main`. Not here: starting processes (tools/launch.py), facts about
ranks for the rest of libai (libai/utils/distributed.py).
"""

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import json
import logging
import os
import platform
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from libai import openblas
from libai.utils.rank_notes import (
    FAILURE_DIR_VARIABLE,
    LOCAL_RANKS_VARIABLE,
    dump_stacks_on_signal,
    note_leaving,
    read_leaving,
    without_harmless_lines,
)

RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
DEFAULT_CONNECT_SECONDS = 120.0
# Stopped from outside with everything saved (libai.engine.stop.EXIT_RESUMABLE): all ranks leave with it, or none.
_EXIT_RESUMABLE = 75
# For how long a rank that is ready to leave waits for the others of its machine.
LEAVE_TOGETHER_SECONDS = 10.0

# The oneflow 0.9.0 wheel holds machine code for these and no PTX that a driver could compile for others.
FIRST_COMPUTE_CAPABILITY = (6, 0)
END_COMPUTE_CAPABILITY = (9, 0)

_PR_SET_PDEATHSIG = 1


def prepare_environment() -> None:
    """Set what oneflow 0.9.0 needs before its first import. Cheap, idempotent; never overrides the user.

    Where oneflow has been imported already, only its matrix products can still be made faster.
    """
    core_type = choose_openblas_core(_read_cpuinfo())
    if core_type is not None:
        os.environ.setdefault("OPENBLAS_CORETYPE", core_type)
    if not any(isinstance(finder, _OneFlowFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OneFlowFinder())
    if "oneflow" in sys.modules and openblas.is_wanted():
        openblas.use_current()


# ---------------------------------------------------------------------------------------------------- the CPU


def choose_openblas_core(cpuinfo: str) -> str | None:
    """Return the `OPENBLAS_CORETYPE` for a CPU, None when the choice is better left to OpenBLAS.

    `cpuinfo` is the text of /proc/cpuinfo. The OpenBLAS inside the oneflow 0.9.0 wheel does not recognise CPUs newer
    than itself and falls back to a kernel without AVX, 2.3 times slower in matrix products (measured on an EPYC).
    """
    fields = dict(_split_field(line) for line in cpuinfo.partition("\n\n")[0].splitlines() if ":" in line)
    flags = set(fields.get("flags", "").split())
    if not {"avx2", "fma"} <= flags:
        return None
    if fields.get("vendor_id") == "AuthenticAMD":
        return "Zen"
    return "SkylakeX" if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags else "Haswell"


def _split_field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _read_cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read(16_384)  # the first CPU is enough
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------ importing oneflow


class _OneFlowFinder(importlib.abc.MetaPathFinder):
    """Finds only `oneflow`, as Python would, and puts `_OneFlowLoader` around its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "oneflow":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _OneFlowLoader(spec.loader)
        return spec


class _OneFlowLoader(importlib.abc.Loader):
    """Meets rank 0 before oneflow is executed, and explains an import that fails.

    Under a launcher `import oneflow` is the rendezvous. A rank that calls rank 0 before it listens sleeps ten fixed
    seconds inside oneflow, so ranks above 0 wait for the port here first.
    """

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # get_data, get_source and others that tools ask a loader for

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        wants_other_openblas = openblas.is_wanted()
        if int(os.environ.get("RANK", 0)) > 0 and "MASTER_PORT" in os.environ:
            wait_for_rank0()
        try:
            with _limited_rendezvous(), without_harmless_lines():
                self._loader.exec_module(module)
        except ImportError as error:
            text = explain_import_error(error)
            if text is None:
                raise
            raise _oneflow_import_error(text) from error
        if wants_other_openblas:
            openblas.use_current()


@contextlib.contextmanager
def _limited_rendezvous() -> Iterator[None]:
    """End this rank by SIGALRM, which tools/launch.py explains, when the other ranks do not come in time.

    oneflow 0.9.0 waits for them for ever, in C++ with the interpreter locked: no Python code could end the wait.
    """
    limited = _world_size() > 1 and bool(os.environ.get(FAILURE_DIR_VARIABLE))
    if limited:
        signal.setitimer(signal.ITIMER_REAL, connect_seconds())
    try:
        yield
    finally:
        if limited:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def connect_seconds() -> float:
    """Return how long a rank waits for the others: LIBAI_CONNECT_TIMEOUT, else 120 seconds."""
    return read_seconds("LIBAI_CONNECT_TIMEOUT", DEFAULT_CONNECT_SECONDS)


def read_seconds(variable: str, default: float) -> float:
    """Return a positive number of seconds from the environment; `UserError` for anything else."""
    from libai.utils.errors import UserError

    text = os.environ.get(variable, "")
    with contextlib.suppress(ValueError):
        seconds = float(text or default)
        if 0 < seconds < float("inf"):
            return seconds
    raise UserError(f"{variable} is {text!r}; it must be a number of seconds above 0, such as {default:g}.")


@functools.cache
def _import_error_class() -> type[ImportError]:
    from libai.utils.errors import UserError  # not at the top: this module is imported before all others

    class OneFlowImportError(ImportError, UserError):
        """oneflow cannot be imported in this environment; the text says what to install."""

    return OneFlowImportError


def _oneflow_import_error(text: str) -> ImportError:
    return _import_error_class()(text, name="oneflow")


def explain_import_error(error: ImportError) -> str | None:
    """Return one line that says what to do about a failed `import oneflow`, None if `error` is about something else."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "oneflow":
        version = platform.python_version()
        if sys.version_info[:2] > (3, 10):
            return (
                f"`import oneflow` needs CPython 3.7 to 3.10 (there is no wheel of oneflow 0.9.0 for others); "
                f"this is {version}. `bash tools/env.sh` makes an environment that fits."
            )
        return f"oneflow is not installed in {sys.prefix}. Run `pip install -e .` there, or `bash tools/env.sh`."
    if "libcudnn" in text or "libcublas" in text:
        library = text.split(":")[0]
        return (
            f"`import oneflow` needs {library}, also without a GPU, and did not find it. Install "
            "nvidia-cudnn-cu11==8.5.0.96 and nvidia-cublas-cu11==11.10.3.66 into the same site-packages as oneflow, "
            "or put a system's cuDNN 8 and cuBLAS 11 on LD_LIBRARY_PATH."
        )
    return None


def wait_for_rank0(limit_seconds: float | None = None) -> None:
    """Return as soon as somebody listens at MASTER_ADDR:MASTER_PORT.

    `limit_seconds` is `connect_seconds()` when None. Raises `UserError` naming the address when it has passed.
    """
    from libai.utils.errors import UserError

    if limit_seconds is None:
        limit_seconds = connect_seconds()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + limit_seconds
    reason: OSError | None = None
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            return
        except OSError as error:
            reason = error
            time.sleep(0.05)
    raise UserError(
        f"rank {os.environ.get('RANK')} could not reach rank 0 at {address}:{port} within {limit_seconds:g} s "
        f"({reason}). Is the first node running, with the same ADDR and PORT, and no firewall in between? "
        "LIBAI_CONNECT_TIMEOUT=<seconds> waits longer."
    )


def hide_rendezvous_environment() -> dict[str, str]:
    """Remove the launcher's variables from this process and return them.

    A tool that is not a rank itself (the launcher's pre-flight check, a subprocess of a test) would otherwise try to
    meet the other ranks as soon as it imports oneflow.
    """
    return {name: os.environ.pop(name) for name in RENDEZVOUS_VARIABLES if name in os.environ}


# --------------------------------------------------------------------------------------------------- the GPU


def check_gpu() -> str | None:
    """Return a line about visible GPUs that oneflow 0.9.0 has no code for; None if all will do or there are none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None  # no driver, or one too old to know compute_cap: then the GPU is old enough too
    return explain_unsupported_gpus(listing)


def explain_unsupported_gpus(listing: str) -> str | None:
    """Return a line about the GPUs in `listing` (lines `name, major.minor`) that oneflow 0.9.0 cannot use, or None."""
    unsupported = []
    for line in listing.splitlines():
        name, _, capability = line.rpartition(",")
        major, _, minor = capability.strip().partition(".")
        if not (major.isdigit() and minor.isdigit()):
            continue
        if not FIRST_COMPUTE_CAPABILITY <= (int(major), int(minor)) < END_COMPUTE_CAPABILITY:
            unsupported.append(f"{name.strip()} ({capability.strip()})")
    if not unsupported:
        return None
    return (
        f"oneflow 0.9.0 has machine code for GPUs of compute capability 6.0 to 8.9 (Pascal to Ada) only; here: "
        f"{', '.join(sorted(set(unsupported)))}. Use another GPU (CUDA_VISIBLE_DEVICES) or train.device=cpu."
    )


# ------------------------------------------------------------------------------------------ living and dying


def request_parent_death_signal(parent_pid: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends, so that no rank outlives its launcher.

    `parent_pid` is the expected parent: if it is gone already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def guarded_main(main: Callable[[], object]) -> NoReturn:
    """Run `main` and leave the process with an exit code; never returns and never hangs the job.

    Codes: what `main` returns or gives to `sys.exit` (None is 0); 2 for a `UserError`, whose text rank 0 prints; 130
    for Ctrl-C; 1 for anything else, with rank and traceback on stderr. In a job of several processes every code but 0
    leaves by `os._exit`: oneflow 0.9.0's own exit handler waits for ever for ranks that are still training. With 0
    that handler is wanted: the ranks meet in it, so that none is missed by the others.
    """
    code = run_guarded(main)
    if code != 0 and _world_size() > 1:
        leave_at_once(code)
    note_leaving(code)
    sys.exit(code)


def run_guarded(main: Callable[[], object]) -> int:
    """Run `main`, report what it raises and return the exit code, as described at `guarded_main`."""
    try:
        return _as_exit_code(main())
    except SystemExit as stop:
        return _as_exit_code(stop.code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        return _report(error)


def leave_at_once(code: int) -> NoReturn:
    """End the process without exit handlers, but with everything written that was printed or logged.

    The code is noted first (`note_leaving`). Ranks stopped from outside leave together: oneflow 0.9.0 aborts a rank
    whose heartbeat misses another, every 7 to 13 seconds, and it may still be busy with its last lines.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    note_leaving(code)
    if code == _EXIT_RESUMABLE:
        _wait_for_leaving_ranks(LEAVE_TOGETHER_SECONDS)
    os._exit(code)


def _wait_for_leaving_ranks(limit_seconds: float) -> None:
    """Return when every rank of this machine has noted that it leaves, at the latest after `limit_seconds`."""
    folder = os.environ.get(FAILURE_DIR_VARIABLE)
    num_ranks = int(os.environ.get(LOCAL_RANKS_VARIABLE, 1))
    end = time.monotonic() + limit_seconds
    while folder and len(read_leaving(folder)) < num_ranks and time.monotonic() < end:
        time.sleep(0.01)


def run_script(arguments: Sequence[str]) -> NoReturn:
    """Run a Python file as `__main__`, like `python FILE ARGUMENTS`, as one guarded rank of the launcher's job.

    `arguments`: the launcher's process id, the file, the file's arguments.
    """
    launcher_pid, file, *rest = arguments
    request_parent_death_signal(int(launcher_pid))
    dump_stacks_on_signal()
    sys.argv = [file, *rest]
    sys.path[0] = str(Path(file).resolve().parent)

    def run_file() -> None:
        runpy.run_path(file, run_name="__main__")

    guarded_main(run_file)


def _as_exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    print(value, file=sys.stderr)  # as Python does for `sys.exit("text")`
    return 1


def _report(error: BaseException) -> int:
    """Say what went wrong, once per job where it is a user's mistake, and return the exit code."""
    from libai.utils.errors import UserError

    rank = max(0, int(os.environ.get("RANK", 0)))  # importing oneflow without a launcher sets RANK=-1
    is_mistake = isinstance(error, UserError)
    text = str(error) if is_mistake or getattr(error, "explains_itself", False) else None
    if text is None and isinstance(error, ImportError):
        text = explain_import_error(error)
        is_mistake = text is not None
    has_launcher = _record_failure(rank, error, text)
    if text is None:
        where = f"rank {rank} failed:\n" if _world_size() > 1 else ""
        # one write, so that the lines of several ranks do not mix
        sys.stderr.write(where + "".join(traceback.format_exception(type(error), error, _own_frames(error))))
        return 1
    if rank == 0:
        print(f"error: {text}", file=sys.stderr)
    elif not has_launcher:  # tools/launch.py prints the text of another rank when rank 0 had none
        print(f"error: rank {rank}: {text}", file=sys.stderr)
    return 2 if is_mistake else 1


def _record_failure(rank: int, error: BaseException, text: str | None) -> bool:
    """Leave a note for tools/launch.py, which tells the user which rank failed first. False when nobody asks for it."""
    folder = os.environ.get(FAILURE_DIR_VARIABLE)
    if not folder:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    reason = text or traceback.format_exception_only(type(error), error)[-1].strip()
    note = {"rank": rank, "time": time.time(), "reason": reason, "where": where, "kind": type(error).__name__}
    note["iteration"] = getattr(error, "iteration", None)
    try:
        Path(folder, f"rank_{rank}.json").write_text(json.dumps(note), encoding="utf-8")
    except OSError:
        return False  # the report on stderr must come out whatever the disk does
    return True


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the leading frames of this file and runpy, which tell a user nothing."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        if frame.tb_frame.f_code.co_filename not in {__file__, runpy.__file__}:
            break
        frame = frame.tb_next
    return frame


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))
