"""Lets OneFlow take its matrix products from a current OpenBLAS.

The OpenBLAS in the oneflow 0.9.0 wheel is 0.3.3, of 2018. liboneflow calls it through its table of dynamic symbols
(`cblas_sgemm@PLT`), and `use_current` writes the same function of the package `scipy-openblas32` into that
table. docs/decisions/0010-current-openblas.md tells why, and what was measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from libai.symbol_table import Unavailable, address_of, find_slot, open_oneflow, require_linux_x86_64

#: `bundled`: oneflow keeps its own
VARIABLE = "LIBAI_OPENBLAS"
_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm")
_THREADS = "OPENBLAS_NUM_THREADS"

_in_use: str | None = None


def is_wanted() -> bool:
    """False with LIBAI_OPENBLAS=bundled; `UserError` for any other value."""
    from libai.utils.errors import UserError

    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is {asked!r}; it must be bundled (oneflow keeps its own OpenBLAS), or not be set.")
    return not asked


def use_current() -> None:
    """Let the imported oneflow multiply by the OpenBLAS of `scipy-openblas32`, with OPENBLAS_NUM_THREADS threads for
    each product (1 when not set).

    Where that cannot be (no Linux on x86_64, the package is missing, the user has put a library of their own in front
    of oneflow's) oneflow goes on as it is, and a run says so where it names its versions.
    """
    global _in_use
    if _in_use is None:
        with contextlib.suppress(Unavailable):
            _in_use = _replace()


def openblas_in_use() -> str:
    """For reports: the version that oneflow's matrix products come from on CPU, such as "0.3.30", or "bundled"."""
    return _in_use or "bundled"


def _replace() -> str:
    require_linux_x86_64()
    try:
        with _one_thread():
            import scipy_openblas32

            folder = Path(scipy_openblas32.get_lib_dir())
            ours = ctypes.CDLL(str(folder / scipy_openblas32.get_library(fullname=True)))
    except (ImportError, OSError) as error:
        raise Unavailable(f"{error} (pip install scipy-openblas32)") from error
    functions = {name: address_of(ours, f"scipy_{name}") for name in _FUNCTIONS}
    if not all(functions.values()):
        raise Unavailable("scipy-openblas32 calls its functions by other names (0.3.29 and later have the right ones)")
    oneflow = open_oneflow()
    slots = {name: find_slot(oneflow, name) for name in _FUNCTIONS}
    if _THREADS not in os.environ:
        ours.scipy_openblas_set_num_threads(1)  # somebody may have loaded it before
    for name, slot in slots.items():
        slot.value = functions[name]
    read_config = ours.scipy_openblas_get_config
    read_config.restype = ctypes.c_char_p
    return str(read_config().decode().split()[1])  # "OpenBLAS 0.3.30 DYNAMIC_ARCH ..."


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """OpenBLAS makes its threads when it is loaded. As oneflow's own it should have none: ranks and the two threads of
    a compiled step multiply beside each other."""
    given = os.environ.get(_THREADS)
    os.environ.setdefault(_THREADS, "1")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_THREADS]
