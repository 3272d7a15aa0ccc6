"""A compiled library in this process: loaded, its instruction set chosen, its calls counted."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any, NamedTuple

from libai.native.symbol_table import Unavailable, address_of, find_slot, open_oneflow

#: the instruction sets, lowest first: the library knows them by their index
LEVELS = ("sse2", "avx2", "avx512")


class SharedLoops(NamedTuple):
    """Of the loops that are large enough to share: how many were, how many were not, and what is faster now."""

    num_shared: int
    num_alone: int
    prefers_sharing: bool


class Library:
    """Registers its kernels with the loaded oneflow when constructed; there is no way back but `enable(False)`.

    Operations that have run before keep OneFlow's kernels. `Unavailable` for a file that cannot be loaded.
    """

    def __init__(self, path: Path):
        self.is_enabled = True
        oneflow = open_oneflow()  # a library that needs it would load a second one
        try:
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise Unavailable(f"they cannot be loaded ({error})") from error
        self._library.libai_native_use_level.restype = ctypes.c_bool
        self._library.libai_native_op.restype = ctypes.c_char_p
        self._library.libai_native_calls.restype = ctypes.c_int64
        self._library.libai_native_decode.restype = ctypes.c_bool
        self._library.libai_products_in_parts.restype = ctypes.c_bool
        self._library.libai_team_shared.restype = ctypes.c_int64
        self._library.libai_team_alone.restype = ctypes.c_int64
        self._library.libai_team_prefers_sharing.restype = ctypes.c_bool
        with contextlib.suppress(Unavailable):  # products stay oneflow's
            self._library.libai_native_use_sgemm(ctypes.byref(find_slot(oneflow, "cblas_sgemm")))

    def decode(self, step: ctypes.Structure) -> bool:
        """Compute a step of generation (libai/native/decoding.py); False, and nothing, where products are OneFlow's."""
        return bool(self._library.libai_native_decode(ctypes.byref(step)))

    def use_level(self, level: str) -> bool:
        """Compute with this instruction set from now on; False, and no change, where the CPU lacks it."""
        return bool(self._library.libai_native_use_level(LEVELS.index(level)))

    def enable(self, is_enabled: bool) -> None:
        """False: every operation takes OneFlow's own kernel again."""
        self.is_enabled = is_enabled
        self._library.libai_native_enable(ctypes.c_bool(is_enabled))

    def start_threads(self, count: int) -> None:
        """Share the loops of large operations out among `count` threads (src/team.cpp). Once per process."""
        self._library.libai_team_start(count)

    def share_products(self, sgemm: int) -> int:
        """The address of a `cblas_sgemm` that shares large products out among these threads (src/products.cpp).

        `sgemm`: the address of OpenBLAS's, which must use one thread from now on. Once per process.
        """
        self._library.libai_products_start(ctypes.c_void_p(sgemm))
        return address_of(self._library, "libai_products_sgemm")

    def multiply_in_parts(self, sgemm: int, num_threads: int, a: Any, b: Any, c: Any, beta: float = 0.0) -> bool:
        """`c = a b + beta c` as threads would do it, one part after another; False, and nothing, for a small product.

        float32 arrays of NumPy; `a` and `b` may be transposed views of contiguous ones.
        """
        trans = [111 if x.flags.c_contiguous else 112 for x in (a, b)]
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, c)]
        sizes = (*c.shape, a.shape[1])
        factor = ctypes.c_float(beta)
        function = self._library.libai_products_in_parts
        return bool(function(ctypes.c_void_p(sgemm), num_threads, *trans, *sizes, *pointers[:2], factor, pointers[2]))

    def shared_loops(self) -> SharedLoops:
        """How operations have been computed since `start_threads`."""
        library = self._library
        return SharedLoops(
            library.libai_team_shared(), library.libai_team_alone(), library.libai_team_prefers_sharing()
        )

    def calls(self) -> dict[str, int]:
        """How often each operation has been computed by it, for tests."""
        library = self._library
        return {
            library.libai_native_op(i).decode(): library.libai_native_calls(i)
            for i in range(library.libai_native_count())
        }
