"""Which CPU kernels OneFlow computes with: those of libai/native, or its own.

docs/decisions/0015-native-kernels.md tells why, and what was measured.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from libai.native.symbol_table import Unavailable
from libai.utils.errors import UserError

if TYPE_CHECKING:
    from libai.native.library import Library

#: not set or `1`: ours; `0`: oneflow keeps its own; an instruction set: ours, with no more than that
VARIABLE = "LIBAI_NATIVE"
_LEVELS = ("avx512", "avx2", "sse2")

_library: Library | None = None
_description = "oneflow's own"


def wanted_levels() -> tuple[str, ...]:
    """The instruction sets that LIBAI_NATIVE allows, best first, none with 0; `UserError` for any other value."""
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "1"):
        return _LEVELS
    if asked in _LEVELS:
        return _LEVELS[_LEVELS.index(asked) :]
    if asked == "0":
        return ()
    raise UserError(
        f"{VARIABLE} is {asked!r}; it must be 0 (oneflow's own CPU kernels), 1 (ours where they can be compiled) or "
        f"an instruction set that they may use: {', '.join(_LEVELS)}."
    )


def compile_kernels() -> None:
    """Compile them where that has not been done, so that ranks need not wait for one of them. Imports no oneflow."""
    from libai.native.cache import find_library

    with contextlib.suppress(Unavailable):
        if wanted_levels():
            find_library()


def use_kernels(levels: tuple[str, ...]) -> None:
    """Let the imported oneflow compute by our kernels, with the best of `levels` that the CPU has.

    Where that cannot be (no compiler, no folder to write to, another oneflow, a failed test) oneflow continues with its
    own, and a run says so where it names its versions.
    """
    global _library, _description
    if _library is not None or not levels:
        return
    from libai.native.cache import find_library
    from libai.native.library import Library

    try:
        library = Library(find_library())
        level = next(level for level in levels if library.use_level(level))
    except Unavailable as reason:
        _description = f"oneflow's own, which are slower ({reason})"
        return
    _library, _description = library, f"libai's for {level}"


def kernels_in_use() -> str:
    """For reports: "libai's for avx2", or "oneflow's own" and why."""
    return _description


def are_kernels_on() -> bool:
    """Whether operations take our kernels now. Some operations have no other on CPU."""
    return _library is not None and _library.is_enabled


def loaded_library() -> Library | None:
    """The library in use, None with oneflow's own kernels."""
    return _library
