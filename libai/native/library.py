"""A compiled library in this process: loaded, its instruction set chosen, its calls counted."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from libai.symbol_table import Unavailable, open_oneflow

#: the instruction sets, lowest first: the library knows them by their index
LEVELS = ("sse2", "avx2", "avx512")


class Library:
    """Registers its kernels with the loaded oneflow when constructed; there is no way back but `enable(False)`.

    Operations that have run before keep OneFlow's kernels. `Unavailable` for a file that cannot be loaded.
    """

    def __init__(self, path: Path):
        open_oneflow()  # a library that needs it would load a second one
        try:
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise Unavailable(f"they cannot be loaded ({error})") from error
        self._library.libai_native_use_level.restype = ctypes.c_bool
        self._library.libai_native_op.restype = ctypes.c_char_p
        self._library.libai_native_calls.restype = ctypes.c_int64

    def use_level(self, level: str) -> bool:
        """Compute with this instruction set from now on; False, and no change, where the CPU lacks it."""
        return bool(self._library.libai_native_use_level(LEVELS.index(level)))

    def enable(self, is_enabled: bool) -> None:
        """False: every operation takes OneFlow's own kernel again."""
        self._library.libai_native_enable(ctypes.c_bool(is_enabled))

    def calls(self) -> dict[str, int]:
        """How often each operation has been computed by it, for tests."""
        library = self._library
        return {
            library.libai_native_op(i).decode(): library.libai_native_calls(i)
            for i in range(library.libai_native_count())
        }
