"""Make `import oneflow` work. Uses only the standard library.

`libai/__init__.py` calls `prepare_environment` before anything imports oneflow. Processes are
started in libai/launch/job.py. The rest of libai gets ranks from libai/utils/distributed.py.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType

from libai.launch.guard import open_missing_streams
from libai.launch.requirements import (
    NEEDED,
    OneFlowImportError,
    explain_import_error,
    explain_versions,
)
from libai.native import kernels, layer_norm, linear
from libai.patches import openblas
from libai.patches.table import explain_other_version, is_on
from libai.patches.wrong_values import repair_values
from libai.utils.errors import UserError
from libai.utils.rank_notes import (
    DEFAULT_MEETING_SECONDS,
    RENDEZVOUS_VARIABLES,
    START_LIMIT,
    note_progress,
    phase,
    read_limit,
    without_harmless_lines,
    world_size,
)

# factor of the time limit within which another rank waits for rank 0, and the longest time in
# seconds that one attempt to connect may take
_PATIENCE, _LONGEST_TRY = 1.1, 1.1

# option of `ulimit`, its limit, the smallest accepted value, what it limits. A rank opens about 20
# files, and more for connections to other ranks and for processes that load data. It starts about
# 20 threads, and more on many cores.
_LIMITS = (
    ("-n", resource.RLIMIT_NOFILE, 64, "open files"),
    ("-u", resource.RLIMIT_NPROC, 32, "processes and threads"),
)


def prepare_environment() -> None:
    """Prepare the environment for the first import of oneflow 0.9.0.

    The call is cheap and idempotent, and never overrides the user's settings. If oneflow has
    already been imported, only its matmuls and other CPU kernels can still be made faster.
    """
    open_missing_streams()
    core_type = choose_openblas_core(read_cpuinfo())
    if core_type is not None:
        os.environ.setdefault("OPENBLAS_CORETYPE", core_type)
    if not any(isinstance(finder, _OneFlowFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OneFlowFinder())
    if "oneflow" in sys.modules:
        _apply_patches()


# ----------------------------------------------------------------------------------------------
# the CPU


def choose_openblas_core(cpuinfo: str) -> str | None:
    """Return the `OPENBLAS_CORETYPE` for a CPU, or None if OpenBLAS should choose.

    `cpuinfo` is the text of /proc/cpuinfo. The OpenBLAS in the oneflow 0.9.0 wheel does not
    recognize CPUs newer than itself. It falls back to a kernel without AVX, which makes matmuls 2.3
    times slower (measured on an EPYC).
    """
    lines = [
        line.split(":", 1) for line in cpuinfo.partition("\n\n")[0].splitlines() if ":" in line
    ]
    fields = {name.strip(): value.strip() for name, value in lines}
    flags = set(fields.get("flags", "").split())
    if not {"avx2", "fma"} <= flags:
        return None
    if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags:
        return (
            "SkylakeX"  # best for Zen 5 too: 250 GFLOP/s per core, against 131 with the Zen kernels
        )
    return "Zen" if fields.get("vendor_id") == "AuthenticAMD" else "Haswell"


def read_cpuinfo() -> str:
    """Return the part of /proc/cpuinfo about the first CPUs, or "" if it cannot be read."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read(16_384)  # the first CPU is enough
    except OSError:
        return ""


# ----------------------------------------------------------------------------------------------
# importing oneflow


class _OneFlowFinder(importlib.abc.MetaPathFinder):
    """Find the packages that libai needs, as Python would, and wrap oneflow's loader in
    `_OneFlowLoader`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NEEDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            if spec.submodule_search_locations is None:
                raise OneFlowImportError(
                    f"{spec.origin} hides the package {fullname}. Rename that file."
                )
            if fullname == "oneflow":
                spec.loader = _OneFlowLoader(spec.loader)  # type: ignore[assignment]
        return spec


class _OneFlowLoader:
    """Wait for rank 0 before executing oneflow, and explain an import that fails.

    Under a launcher, `import oneflow` is the rendezvous. If a rank contacts rank 0 before rank 0
    listens, oneflow sleeps for ten seconds. Ranks above 0 therefore first wait here until the port
    is open.
    """

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(
            self._loader, name
        )  # Python uses create_module, tools use get_data, get_source and others

    def exec_module(self, module: ModuleType) -> None:
        if (text := explain_versions()) is not None:
            raise OneFlowImportError(text)
        for option, limit, least, what in _LIMITS:
            soft_limit = resource.getrlimit(limit)[0]
            if 0 <= soft_limit < least:  # oneflow would abort the process
                raise OneFlowImportError(
                    f"`ulimit {option}` allows {soft_limit} {what}, and training needs {least}. "
                    f"Raise it: `ulimit {option} 1024`."
                )
        # Report mistakes in LIBAI_PATCHES and LIBAI_NATIVE before anything is loaded.
        is_on("openblas")
        kernels.allowed_levels()
        try:
            importlib.import_module(
                "numpy"
            )  # oneflow's C++ code would blame the version if another file hides numpy
            with (
                phase("meet", DEFAULT_MEETING_SECONDS)
                if world_size() > 1
                else contextlib.nullcontext()
            ):
                if "MASTER_PORT" in os.environ and int(os.environ.get("RANK", 0)) > 0:
                    wait_for_rank0()
                with without_harmless_lines():
                    self._loader.exec_module(module)
        except (ImportError, RuntimeError, MemoryError) as error:
            text = explain_import_error(error)
            if text is None:
                raise
            raise OneFlowImportError(text) from error
        if (
            text := explain_versions()
        ) is not None:  # check again with the modules that are now loaded
            raise OneFlowImportError(text)
        _take_back_ctrl_c()
        _apply_patches()


def compile_kernels() -> None:
    """Compile the CPU kernels if they are on and not compiled yet, so that ranks do not wait for
    one another.
    """
    if is_on("kernels"):
        kernels.compile_kernels()


def _take_back_ctrl_c() -> None:
    """Reinstall Python's SIGINT handler, which oneflow's import replaces: Ctrl-C would end with
    exit code 255.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGINT, handler)


def _apply_patches() -> None:
    if (text := explain_other_version()) is not None:
        raise OneFlowImportError(text)
    # these modules import oneflow
    from libai.patches.gradients import repair_gradients
    from libai.patches.local_operations import repair_operations

    repair_operations()
    repair_values()
    repair_gradients()
    if is_on("openblas"):
        openblas.use_current()
    if is_on("kernels"):
        kernels.use_kernels()
        if is_on("recurrent"):
            kernels.replace_functions("recurrent")
        if is_on("linear") and kernels.replace_functions("linear"):
            linear.use_operation()
    if kernels.are_kernels_on() and is_on("layer-norm"):
        layer_norm.use_operation()
    if is_on("contiguous-copies"):
        kernels.copy_without_nodes()
    if is_on("threads"):
        openblas.use_threads(kernels.loaded_library())
    if is_on("memory-plan"):
        kernels.replace_functions("memory-plan")


def wait_for_rank0() -> None:
    """Wait until rank 0 listens at MASTER_ADDR:MASTER_PORT.

    Raises `UserError` after the time limit.
    """
    limit = read_limit(START_LIMIT, DEFAULT_MEETING_SECONDS)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The launcher ends a rank 0 that hangs after the same limit, and names it.
    left = limit * _PATIENCE or float("inf")
    reason = None
    while left > 0:
        began = time.monotonic()
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            return
        except OSError as error:
            reason = error
            note_progress()  # only the time limit of this function applies
            time.sleep(0.05)
        # like the launcher, count only the time in which this process runs
        left -= min(time.monotonic() - began, _LONGEST_TRY)
    raise UserError(
        f"rank {os.environ.get('RANK')} could not reach rank 0 at {address}:{port} within "
        f"{limit:g} s ({reason}). Is the first node running, with the same ADDR and PORT, and no "
        f"firewall in between? {START_LIMIT}=<seconds> waits longer."
    )


def hide_rendezvous_environment() -> None:
    """Remove the launcher's variables from this process.

    A process that is not a rank, such as the launcher or a subprocess of a test,
    would otherwise join the rendezvous as soon as it imports oneflow.
    """
    for name in RENDEZVOUS_VARIABLES:
        os.environ.pop(name, None)
