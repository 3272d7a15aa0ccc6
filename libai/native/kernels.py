"""The CPU kernels that OneFlow computes with: those of libai/native, as a compiled library, or its own.

Reasons and measurements: docs/dev/decisions/0012-native-kernels.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from libai.native.symbol_table import Unavailable, address_of, find_slot, open_oneflow
from libai.utils.errors import UserError

#: environment variable with the best instruction set that kernels may use; all may be used without it
VARIABLE = "LIBAI_NATIVE"
#: the instruction sets, lowest first: the library knows them by their index
LEVELS = ("sse2", "avx2", "avx512")
#: OneFlow's `IntraJobMemSharingUtil::InferMemBlockId4MemReusedRegst`
OWN_MEMORY_PLANNER = (
    "_ZN7oneflow22IntraJobMemSharingUtil30InferMemBlockId4MemReusedRegstEPNS_4PlanERKSt8functionIFbRKSsS5_EE"
)


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
        self._library.libai_memory_plan.restype = ctypes.c_void_p
        with contextlib.suppress(Unavailable):  # products stay oneflow's
            self._library.libai_native_use_sgemm(ctypes.byref(find_slot(oneflow, "cblas_sgemm")))

    def decode(self, step: Any) -> bool:
        """Compute a step of generation (libai/native/decoding.py); False, and nothing, where products are OneFlow's."""
        return bool(self._library.libai_native_decode(ctypes.c_void_p(step.ctypes.data)))

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

    def plan_memory(self) -> None:
        """Make the results of compiled CPU steps share memory from now on (src/memory_plan.cpp); `Unavailable` if not.

        Bit-equal. Once per process.
        """
        oneflow = open_oneflow()
        slot = find_slot(oneflow, OWN_MEMORY_PLANNER)
        slot.value = self._library.libai_memory_plan(ctypes.c_void_p(address_of(oneflow, OWN_MEMORY_PLANNER)))

    def calls(self) -> dict[str, int]:
        """Return the number of times that it has computed each operation, for tests."""
        library = self._library
        return {
            library.libai_native_op(i).decode(): library.libai_native_calls(i)
            for i in range(library.libai_native_count())
        }


_library: Library | None = None
_description = "oneflow's own"
_plans_memory = False


def allowed_levels() -> tuple[str, ...]:
    """Return the instruction sets that `LIBAI_NATIVE` allows, best first; `UserError` for an unknown one."""
    best = os.environ.get(VARIABLE, LEVELS[-1])
    if best not in LEVELS:
        raise UserError(
            f"{VARIABLE}={best} is not an instruction set. Choose the best one that kernels may use: "
            f"{', '.join(LEVELS)}; LIBAI_PATCHES=-kernels switches them off."
        )
    return LEVELS[LEVELS.index(best) :: -1]


def compile_kernels() -> None:
    """Compile them where that has not been done, so that ranks need not wait for one of them. Imports no oneflow."""
    from libai.native.build import find_library

    with contextlib.suppress(Unavailable):
        find_library()


def use_kernels() -> None:
    """Make the imported oneflow compute by our kernels, with the best allowed instruction set that the CPU has.

    Where that cannot be (no compiler, no folder to write to, another oneflow, a failed test) oneflow continues with its
    own, and a run says so in a warning.
    """
    global _library, _description
    if _library is not None:
        return
    from libai.native.build import find_library

    try:
        library = Library(find_library())
        level = next(level for level in allowed_levels() if library.use_level(level))
    except Unavailable as reason:
        _description = f"oneflow's own, which are slower ({reason})"
        return
    _library, _description = library, f"libai's for {level}"


def plan_memory() -> None:
    """Make the results of compiled CPU steps share memory, if our library is loaded and this OneFlow allows it."""
    global _plans_memory
    if _library is not None and not _plans_memory:
        with contextlib.suppress(Unavailable):
            _library.plan_memory()
            _plans_memory = True


def kernels_in_use() -> str:
    """For reports: "libai's for avx2", or "oneflow's own" and why."""
    return _description


def are_kernels_on() -> bool:
    """Return whether operations take our kernels now. Some operations have no other on CPU."""
    return _library is not None and _library.is_enabled


def loaded_library() -> Library | None:
    """The library in use, None with oneflow's own kernels."""
    return _library
