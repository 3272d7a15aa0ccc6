"""Access liboneflow's dynamic symbol table, which holds the addresses by which it calls its own
exported functions.

Writing a function's address to an entry replaces that OneFlow function in the whole process.
libai/patches/openblas.py replaces matmul functions this way, and launch_race.py one function of the
graph launch. This works only on Linux on x86_64.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

# constants from <dlfcn.h> and <elf.h>, with sizes and types for x86_64
_RTLD_DI_LINKMAP = 2
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL = 0, 2, 5, 6, 23
_R_X86_64_JUMP_SLOT = 7


class Unavailable(Exception):
    """A function of OneFlow cannot be replaced, for the reason in the message."""


class _LinkMap(ctypes.Structure):
    """`struct link_map`, the dynamic linker's record of a loaded library."""

    _fields_ = (("l_addr", ctypes.c_uint64), ("l_name", ctypes.c_char_p), ("l_ld", ctypes.c_uint64))


def require_linux_x86_64() -> None:
    """Raise `Unavailable` on any other platform."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise Unavailable(
            f"this is {platform.system()} on {platform.machine()}, not Linux on x86_64"
        )


def find_package() -> Path:
    """Return the folder of the installed oneflow, without importing it."""
    spec = importlib.util.find_spec("oneflow")
    if spec is None or spec.origin is None:
        raise Unavailable("oneflow is not installed")
    return Path(spec.origin).parent


def open_oneflow() -> ctypes.CDLL:
    """Return the wheel's liboneflow, which this process has loaded.

    Raises `Unavailable` if it has not, and on other platforms than Linux on x86_64.
    """
    require_linux_x86_64()
    for path in find_package().parent.glob("oneflow.libs/liboneflow-*.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    raise Unavailable("the liboneflow of a wheel is not loaded")


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Return the address at which the dynamic linker finds the function `name`, starting with
    `library`, or 0.
    """
    function = getattr(library, name, None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0


def find_slot(library: ctypes.CDLL, name: str) -> ctypes.c_uint64:
    """Return the writable table entry through which `library` calls `name`, a function of its own
    or of libc.

    Raises `Unavailable` if there is no such entry, or another library already overrides `name`.
    """
    own, preferred = address_of(library, name), address_of(ctypes.CDLL(None), name)
    if not own:
        raise Unavailable(f"oneflow has no function {name}")
    if preferred not in (0, own):
        raise Unavailable(f"a library that defines {name} is loaded before oneflow's")
    record = ctypes.POINTER(_LinkMap)()
    if ctypes.CDLL(None).dlinfo(
        ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(record)
    ):
        raise Unavailable("the dynamic linker has no information about liboneflow")
    base = record.contents.l_addr
    dynamic = _read_dynamic_section(record.contents.l_ld)
    if not {_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL} <= dynamic.keys():
        raise Unavailable("liboneflow has no table of dynamic symbols")
    # rows of Elf64_Rela: offset, info (symbol << 32 | type), addend
    relocations = _view_rows(dynamic[_DT_JMPREL], dynamic[_DT_PLTRELSZ] // 24)
    relocations = relocations[(relocations[:, 1] & 0xFFFFFFFF) == _R_X86_64_JUMP_SLOT]
    symbols = (relocations[:, 1] >> 32).astype(int)
    # rows of Elf64_Sym: name, info and section; value; size
    rows = _view_rows(dynamic[_DT_SYMTAB], int(symbols.max()) + 1)[symbols]
    offsets = relocations[rows[:, 1] == own - base, 0]
    if not len(offsets):  # imported functions have a name in the table, but no value
        imports = rows[:, 1] == 0
        names = dynamic[_DT_STRTAB] + (rows[imports, 0] & 0xFFFFFFFF)
        offsets = relocations[imports, 0][
            [ctypes.string_at(at) == name.encode() for at in names.tolist()]
        ]
    if len(offsets) != 1:
        raise Unavailable(f"oneflow does not call {name} through its table of dynamic symbols")
    # the wheel's library is linked without -z now, so its table stays writable
    return ctypes.c_uint64.from_address(base + int(offsets[0]))


def _read_dynamic_section(address: int) -> dict[int, int]:
    entries = {}
    while (tag := ctypes.c_int64.from_address(address).value) != _DT_NULL:
        entries[tag] = ctypes.c_uint64.from_address(address + 8).value
        address += 16
    return entries


def _view_rows(address: int, count: int) -> Any:
    """Return a view of memory as a `(count, 3)` array of 64-bit words."""
    import numpy as np

    words = (ctypes.c_uint64 * (3 * count)).from_address(address)
    return np.ctypeslib.as_array(words).reshape(count, 3)
