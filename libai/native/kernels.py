"""Load and control the compiled CPU kernels of libai/native, which replace OneFlow's own.

Reasons and measurements are in docs/dev/decisions/0012-native-kernels.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from libai.native.symbol_table import Unavailable, address_of, find_slot, open_oneflow
from libai.utils.errors import UserError

#: environment variable that names the highest instruction set that kernels may use; unset allows
#: all
VARIABLE = "LIBAI_NATIVE"
#: instruction sets, lowest first; the index is the level number in the library
LEVELS = ("sse2", "avx2", "avx512")
#: OneFlow's `IntraJobMemSharingUtil::InferMemBlockId4MemReusedRegst`
OWN_MEMORY_PLANNER = "_ZN7oneflow22IntraJobMemSharingUtil30InferMemBlockId4MemReusedRegstEPNS_4PlanERKSt8functionIFbRKSsS5_EE"  # noqa: E501
#: OneFlow's `ConstructKernel` and `Thread::AddTask`
OWN_KERNEL_MAKER = "_ZN7oneflow15ConstructKernelERKNS_10KernelConfEPNS_13KernelContextE"
OWN_TASK_ADDER = "_ZN7oneflow6Thread7AddTaskERKNS_9TaskProtoE"
#: OneFlow's `functional::ToContiguous`
OWN_COPY = "_ZN7oneflow3one10functional12ToContiguousERKSt10shared_ptrINS0_6TensorEE"
#: OneFlow's `functional::FusedMatmulBias`
OWN_LINEAR = "_ZN7oneflow3one10functional15FusedMatmulBiasERKSt10shared_ptrINS0_6TensorEES6_S6_RKNS_8OptionalIS3_EE"  # noqa: E501
#: OneFlow's functions of recurrent networks on padded sequences, in the order of the kinds in
#: src/recurrent.cpp
OWN_RECURRENT = tuple(
    f"_ZN7oneflow3one10functional{name}ERKSt10shared_ptrINS0_6TensorEE{states}bifbbb"
    for name, states in (
        ("9LstmInput", "RKNS0_11TensorTupleES9_"),
        ("8GruInput", "S6_RKNS0_11TensorTupleE"),
        ("12RnnTanhInput", "S6_RKNS0_11TensorTupleE"),
        ("12RnnReluInput", "S6_RKNS0_11TensorTupleE"),
    )
)
#: patch -> OneFlow's functions that it replaces, each with the name of our function that returns
#: the replacement, and the arguments of that function
_REPLACED: dict[str, tuple[tuple[Any, ...], ...]] = {
    "memory-plan": ((OWN_MEMORY_PLANNER, "libai_memory_plan"),),  # src/memory_plan.cpp
    "lean-kernels": (
        (OWN_KERNEL_MAKER, "libai_lean_kernels"),  # src/memory_plan.cpp
        (OWN_TASK_ADDER, "libai_lean_plans"),
    ),
    "contiguous-copies": ((OWN_COPY, "libai_contiguous"),),  # src/contiguous.cpp
    "linear": ((OWN_LINEAR, "libai_linear"),),  # src/linear.cpp
    "recurrent": tuple(  # src/recurrent.cpp
        (own, "libai_recurrent", kind) for kind, own in enumerate(OWN_RECURRENT)
    ),
}
#: patches of functions that OneFlow's library of functions for Python calls, not liboneflow
_CALLED_BY_PYTHON = ("linear", "recurrent")


class Library:
    """A compiled library. Creating this object registers the kernels with the loaded oneflow.

    Registration cannot be undone, but `enable(False)` disables the kernels. Operations that have
    already run keep OneFlow's kernels. Raises `Unavailable` for a file that cannot be loaded.
    """

    def __init__(self, path: Path):
        self.is_enabled = True
        oneflow = (
            open_oneflow()
        )  # otherwise loading our library would load a second copy of oneflow
        try:
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise Unavailable(f"the kernels cannot be loaded ({error})") from error
        self._library.libai_native_use_level.restype = ctypes.c_bool
        self._library.libai_native_op.restype = ctypes.c_char_p
        self._library.libai_native_calls.restype = ctypes.c_int64
        self._library.libai_native_decode.restype = ctypes.c_bool
        self._library.libai_products_start.restype = ctypes.c_bool
        with contextlib.suppress(Unavailable):  # without sgemm, oneflow keeps its own matmuls
            self._library.libai_native_use_sgemm(ctypes.byref(find_slot(oneflow, "cblas_sgemm")))

    def decode(self, step: Any) -> bool:
        """Run one decoding step (libai/inference/native_decoder.py).

        Return False if OneFlow keeps its own matmuls.
        """
        return bool(self._library.libai_native_decode(ctypes.c_void_p(step.ctypes.data)))

    def use_level(self, level: str) -> bool:
        """Switch to this instruction set.

        Return False and change nothing if the CPU does not support it.
        """
        return bool(self._library.libai_native_use_level(LEVELS.index(level)))

    def enable(self, is_enabled: bool) -> None:
        """Enable or disable these kernels.

        While they are disabled, every operation uses OneFlow's own kernel.
        """
        self.is_enabled = is_enabled
        self._library.libai_native_enable(ctypes.c_bool(is_enabled))

    def start_threads(self, count: int) -> None:
        """Split the loops of large operations among `count` threads (src/team.cpp).

        Call it once per process.
        """
        self._library.libai_team_start(count)

    def share_products(self, sgemm: int) -> int:
        """Return the address of a `cblas_sgemm` that splits large matmuls among these threads
        (src/products.cpp), or 0 if that would change bits on this CPU.

        `sgemm` is the address of OpenBLAS's function, which must use a single thread from now on.
        Call it once per process.
        """
        keeps_bits = self._library.libai_products_start(ctypes.c_void_p(sgemm))
        return address_of(self._library, "libai_products_sgemm") if keeps_bits else 0

    def keep_nodes(self, is_kept: bool) -> None:
        """Make the copies of strided inputs with a node in the autograd graph, or without."""
        self._library.libai_contiguous_keeps_node(ctypes.c_bool(is_kept))

    def replace(self, patch: str) -> None:
        """Replace the functions of OneFlow that belong to `patch` with ours.

        Call it once per process. Raises `Unavailable` if this is not possible.
        """
        oneflow = open_oneflow()
        caller = _python_functions() if patch in _CALLED_BY_PYTHON else oneflow
        for own, name, *arguments in _REPLACED[patch]:
            slot = find_slot(caller, own)
            replacement = getattr(self._library, name)
            replacement.restype = ctypes.c_void_p
            slot.value = replacement(*arguments, ctypes.c_void_p(address_of(caller, own)))

    def calls(self) -> dict[str, int]:
        """Return how often the library has computed each operation, for tests."""
        library = self._library
        return {
            library.libai_native_op(i).decode(): library.libai_native_calls(i)
            for i in range(library.libai_native_count())
        }


def _python_functions() -> ctypes.CDLL:
    """Return OneFlow's library of functions for Python."""
    import oneflow as flow

    return ctypes.CDLL(flow._oneflow_internal.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


_library = None
_description = "oneflow's own"


def allowed_levels() -> tuple[str, ...]:
    """Return the instruction sets that `LIBAI_NATIVE` allows, highest first.

    Raises `UserError` for an unknown one.
    """
    best = os.environ.get(VARIABLE, LEVELS[-1])
    if best not in LEVELS:
        raise UserError(
            f"{VARIABLE}={best} is not an instruction set. Choose the highest one that kernels "
            f"may use: {', '.join(LEVELS)}; LIBAI_PATCHES=-kernels switches them off."
        )
    return LEVELS[LEVELS.index(best) :: -1]


def compile_kernels() -> None:
    """Compile the kernels if necessary, so ranks do not have to wait for one another.

    Does not import oneflow.
    """
    from libai.native.build import find_library

    with contextlib.suppress(Unavailable):
        find_library()


def use_kernels() -> None:
    """Make the imported oneflow use our kernels, with the highest allowed instruction set that the
    CPU supports.

    If this is impossible, oneflow keeps its own kernels and the run logs a warning. Possible
    reasons are a missing compiler, no writable folder, a different version of oneflow, or a failed
    test.
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


@functools.cache
def replace_functions(patch: str) -> bool:
    """Replace the functions of OneFlow that belong to `patch`, for the whole process.

    Return whether our library is loaded and OneFlow allows it. `memory-plan`: results in compiled
    CPU steps share memory and stay bit-equal. `lean-kernels`: compiled CPU steps drop descriptions
    that only compilation reads. `recurrent`, `linear`: such layers are one operation.
    """
    with contextlib.suppress(Unavailable):
        if _library is not None:
            _library.replace(patch)
            return True
    return False


def copy_without_nodes() -> None:
    """Make contiguous copies without a node in the autograd graph, if our library is loaded and
    OneFlow allows it.

    A copy that `Tensor.contiguous` returns keeps its node, because hooks may be registered on it.
    """
    if _library is None or not replace_functions("contiguous-copies"):
        return
    import oneflow as flow

    keep_nodes = _library.keep_nodes
    copy = flow.Tensor.contiguous

    @functools.wraps(copy)
    def contiguous(tensor: Any) -> Any:
        keep_nodes(True)
        try:
            return copy(tensor)
        finally:
            keep_nodes(False)

    flow.Tensor.contiguous = contiguous


def kernels_in_use() -> str:
    """Return a description for reports: "libai's for avx2", or "oneflow's own" with the reason."""
    return _description


def are_kernels_on() -> bool:
    """Return True if operations currently use our kernels.

    Some operations have no other CPU kernel.
    """
    return _library is not None and _library.is_enabled


def loaded_library() -> Library | None:
    """Return the loaded library, or None if oneflow uses its own kernels."""
    return _library
