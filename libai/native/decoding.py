"""Build the argument of the native decoding step (`DecoderStep` in src/decode.h) from NumPy arrays.

Every field of the struct is eight bytes wide, so it is represented here as an array of 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_LAYERS = ("attention_norm", "q", "k", "v", "out", "mlp_norm", "gate", "up", "down")
_ARRAYS = ("cos", "sin", "mask", "x", "keys", "values", "scores")
_SIZES = ("num_blocks", "rows", "hidden", "heads", "kv_heads", "head_size", "inner", "vocabulary", "capacity", "length")

#: (weight, bias) of a layer; None for a missing one
Pair = tuple[Any, Any]


class DecoderWeights:
    """The weights and sizes of a decoder. Arrays must be contiguous float32 and are not copied.

    Args:
        blocks: for each block, (weight, bias) pairs of its layers and norms, by the names in `_LAYERS`.
        norm, head: (weight, bias) pairs of the layers after the blocks.
        epsilon, is_rms, activation: settings of all blocks.
        sizes: the entries of `_SIZES` that are the same in every step.
    """

    def __init__(
        self,
        blocks: Sequence[Mapping[str, Pair]],
        norm: Pair,
        head: Pair,
        *,
        epsilon: float,
        is_rms: bool,
        activation: int,
        **sizes: int,
    ):
        self._kept = [blocks, norm, head]
        rows = [[block.get(name, (None, None)) for name in _LAYERS] for block in blocks]
        self._blocks = np.array([[_address(array) for pair in row for array in pair] for row in rows], np.int64)
        self._ends = list(map(_address, (*norm, *head)))
        self._sizes = {"num_blocks": len(blocks), **sizes}
        self._settings = [int(np.float64(epsilon).view(np.int64)), int(is_rms), activation]

    def step(self, arrays: Mapping[str, np.ndarray | None], **sizes: int) -> np.ndarray:
        """Return the argument of `Library.decode`. `arrays` must stay alive until `decode` returns."""
        addresses = [_address(arrays[name]) for name in _ARRAYS]
        counts = [(self._sizes | sizes)[name] for name in _SIZES]
        return np.array([self._blocks.ctypes.data, *self._ends, *addresses, *counts, *self._settings], np.int64)


def _address(array: np.ndarray | None) -> int:
    if array is None:
        return 0
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return array.ctypes.data
