"""Lets OneFlow take its matrix products from a current OpenBLAS.

The OpenBLAS in the oneflow 0.9.0 wheel is 0.3.3, of 2018. liboneflow calls it through its table of dynamic symbols
(`cblas_sgemm@PLT`), and `use_current` writes the same function of the package `scipy-openblas32` into that
table. docs/decisions/0010-current-openblas.md tells why, and what was measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: `bundled`: oneflow keeps its own
VARIABLE = "LIBAI_OPENBLAS"
_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm")
_THREADS = "OPENBLAS_NUM_THREADS"
# of <dlfcn.h> and <elf.h>; sizes and types are those of x86_64
_RTLD_DI_LINKMAP = 2
_DT_NULL, _DT_PLTRELSZ, _DT_SYMTAB, _DT_JMPREL = 0, 2, 6, 23
_R_X86_64_JUMP_SLOT = 7

_in_use: str | None = None


class _LinkMap(ctypes.Structure):
    """`struct link_map`: what the dynamic linker tells of a loaded library."""

    _fields_ = (("l_addr", ctypes.c_uint64), ("l_name", ctypes.c_char_p), ("l_ld", ctypes.c_uint64))


class _Unavailable(Exception):
    """Why oneflow keeps its own OpenBLAS."""


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
        with contextlib.suppress(_Unavailable):
            _in_use = _replace()


def openblas_in_use() -> str:
    """For reports: the version that oneflow's matrix products come from on CPU, such as "0.3.30", or "bundled"."""
    return _in_use or "bundled"


def _replace() -> str:
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise _Unavailable(f"this is {platform.system()} on {platform.machine()}, not Linux on x86_64")
    try:
        with _one_thread():
            import scipy_openblas32

            folder = Path(scipy_openblas32.get_lib_dir())
            ours = ctypes.CDLL(str(folder / scipy_openblas32.get_library(fullname=True)))
    except (ImportError, OSError) as error:
        raise _Unavailable(f"{error} (pip install scipy-openblas32)") from error
    functions = {name: _address(ours, f"scipy_{name}") for name in _FUNCTIONS}
    if not all(functions.values()):
        raise _Unavailable("scipy-openblas32 calls its functions by other names (0.3.29 and later have the right ones)")
    oneflow = ctypes.CDLL(_path_of_oneflow(), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    slots = {name: _find_slot(oneflow, name) for name in _FUNCTIONS}
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


def _path_of_oneflow() -> str:
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")[2]
            if os.path.basename(path).startswith("liboneflow-"):
                return f"/{path}"
    raise _Unavailable("no liboneflow is loaded")


def _address(library: ctypes.CDLL, name: str) -> int:
    """Where the dynamic linker finds the function `name`, beginning with `library`; 0 if nowhere."""
    function = getattr(library, name, None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0


def _find_slot(library: ctypes.CDLL, name: str) -> ctypes.c_uint64:
    """The entry of its table through which `library` calls its own function `name`."""
    own, preferred = _address(library, name), _address(ctypes.CDLL(None), name)
    if preferred not in (0, own):
        raise _Unavailable(f"a library with a {name} of its own has been put in front of oneflow's")
    record = ctypes.POINTER(_LinkMap)()
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(record)):
        raise _Unavailable("the dynamic linker tells nothing about liboneflow")
    base = record.contents.l_addr
    dynamic = _read_dynamic_section(record.contents.l_ld)
    if not {_DT_PLTRELSZ, _DT_SYMTAB, _DT_JMPREL} <= dynamic.keys():
        raise _Unavailable("liboneflow has no table of dynamic symbols")
    # rows of Elf64_Rela: offset, info (symbol << 32 | type), addend
    relocations = _view_rows(dynamic[_DT_JMPREL], dynamic[_DT_PLTRELSZ] // 24)
    relocations = relocations[(relocations[:, 1] & 0xFFFFFFFF) == _R_X86_64_JUMP_SLOT]
    symbols = (relocations[:, 1] >> 32).astype(int)
    # rows of Elf64_Sym: name, info and section; value; size
    values = _view_rows(dynamic[_DT_SYMTAB], int(symbols.max()) + 1)[symbols, 1]
    offsets = relocations[values == own - base, 0]
    if len(offsets) != 1:
        raise _Unavailable(f"oneflow does not call {name} through its table of dynamic symbols")
    return ctypes.c_uint64.from_address(base + int(offsets[0]))


def _read_dynamic_section(address: int) -> dict[int, int]:
    entries = {}
    while (tag := ctypes.c_int64.from_address(address).value) != _DT_NULL:
        entries[tag] = ctypes.c_uint64.from_address(address + 8).value
        address += 16
    return entries


def _view_rows(address: int, count: int) -> Any:
    """Memory as an array (count, 3) of 64-bit words."""
    import numpy as np

    words = (ctypes.c_uint64 * (3 * count)).from_address(address)
    return np.ctypeslib.as_array(words).reshape(count, 3)
