"""Make OneFlow compute matmuls with a current OpenBLAS, and split them among threads.

The oneflow 0.9.0 wheel contains OpenBLAS 0.3.3 from 2018. liboneflow calls it through its dynamic
symbol table (`cblas_sgemm@PLT`). `use_current` replaces the entry with the same function of the
package `scipy-openblas32`. `use_threads` replaces it with a function that calls OpenBLAS for parts
of a matmul. The reasons and measurements are in docs/dev/decisions/0008-current-openblas.md and
0016-threads-in-products.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from libai.native.symbol_table import (
    Unavailable,
    address_of,
    find_slot,
    open_oneflow,
)
from libai.utils.rank_notes import LOCAL_RANKS_VARIABLE, world_size

if TYPE_CHECKING:
    from libai.native.kernels import Library

#: OpenBLAS has memory for 128 simultaneous callers and terminates the process if there are more
_MOST_THREADS = 32
_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm")
_THREADS = "OPENBLAS_NUM_THREADS"
#: file with the CPU time limit of a Linux container
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

_in_use = None
_openblas = None
_num_threads = 1
_library = None


def use_current() -> None:
    """Make the imported oneflow compute matmuls with the OpenBLAS of `scipy-openblas32`.

    Each matmul uses OPENBLAS_NUM_THREADS threads (default 1). If the replacement is impossible,
    oneflow is unchanged, and the run reports this with its versions. Possible reasons are a
    platform other than Linux on x86_64, a missing package, or another library that the user has
    loaded before oneflow's.
    """
    global _in_use
    if _in_use is None:
        with contextlib.suppress(Unavailable):
            _in_use = _replace()


def use_threads(library: Library | None) -> None:
    """Split large operations among `wanted_threads` threads. Results stay bit-equal.

    `library` contains our compiled kernels. If it is None, no operation is split. With OneFlow's
    own OpenBLAS, matmuls are not split.
    """
    global _library, _num_threads
    count = wanted_threads(os.environ)
    if library is None or _library is not None or count == 1:
        return
    library.start_threads(count)
    _library, _num_threads = library, count
    if _openblas is None:
        return
    _openblas.scipy_openblas_set_num_threads(1)
    sgemm = address_of(_openblas, "scipy_cblas_sgemm")
    with contextlib.suppress(Unavailable):
        slot = find_slot(open_oneflow(), "cblas_sgemm")
        slot.value = library.share_products(sgemm) or slot.value


def wanted_threads(environment: Mapping[str, str]) -> int:
    """Return the number of threads for each matmul of this process, at most 32.

    The number is OPENBLAS_NUM_THREADS, else OMP_NUM_THREADS, else the number of usable cores
    divided by the number of ranks on this machine.
    """
    for name in (_THREADS, "OMP_NUM_THREADS"):
        text = environment.get(name, "").partition(",")[0].strip()
        if text.isdecimal() and int(text) > 0:
            return min(int(text), _MOST_THREADS)
    ranks = environment.get(LOCAL_RANKS_VARIABLE) or world_size()
    return min(max(1, usable_cores() // int(ranks)), _MOST_THREADS)


def usable_cores() -> int:
    """Return the number of cores that this process may run on, limited by the CPU quota of its
    container.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def openblas_in_use() -> str:
    """Return the version of the OpenBLAS that oneflow uses on CPU, such as "0.3.30", or "bundled",
    for reports.
    """
    return _in_use or "bundled"


def threads_in_use() -> int:
    """Return the maximum number of threads for a large matmul, for reports."""
    if _library is not None:
        return _num_threads
    return int(_openblas.scipy_openblas_get_num_threads()) if _openblas is not None else 1


def _replace() -> str:
    global _openblas
    try:
        with _one_thread():
            import scipy_openblas32

            folder = Path(scipy_openblas32.get_lib_dir())
            ours = ctypes.CDLL(str(folder / scipy_openblas32.get_library(fullname=True)))
    except (ImportError, OSError) as error:
        raise Unavailable(f"{error} (pip install scipy-openblas32)") from error
    functions = {name: address_of(ours, f"scipy_{name}") for name in _FUNCTIONS}
    if not all(functions.values()):
        raise Unavailable("scipy-openblas32 has different function names (use 0.3.29 or later)")
    oneflow = open_oneflow()
    slots = {name: find_slot(oneflow, name) for name in _FUNCTIONS}
    if _THREADS not in os.environ:
        ours.scipy_openblas_set_num_threads(1)  # other code may have loaded this OpenBLAS before
    for name, slot in slots.items():
        slot.value = functions[name]
    _openblas = ours
    read_config = ours.scipy_openblas_get_config
    read_config.restype = ctypes.c_char_p
    return str(read_config().decode().split()[1])  # "OpenBLAS 0.3.30 DYNAMIC_ARCH ..."


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Set OPENBLAS_NUM_THREADS to 1 inside the block, unless it is set.

    OpenBLAS creates its threads when it is loaded.

    Like oneflow's own OpenBLAS, it should have no extra threads, because ranks and the two threads
    of a compiled step compute matmuls at the same time.
    """
    given = os.environ.get(_THREADS)
    os.environ.setdefault(_THREADS, "1")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_THREADS]
