"""The argument of the native step of generation (`DecoderStep` in src/decode.h), made of NumPy arrays.

All fields of the structure have eight bytes, so that it is a row of 64-bit numbers here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_LAYERS = ("attention_norm", "q", "k", "v", "out", "mlp_norm", "gate", "up", "down")
_ARRAYS = ("cos", "sin", "mask", "x", "keys", "values", "scores")
_SIZES = ("num_blocks", "rows", "hidden", "heads", "kv_heads", "head_size", "inner", "vocabulary", "capacity", "length")

#: weight and bias, None for one that is missing
Pair = tuple[Any, Any]


class DecoderWeights:
    """The weights of a decoder and its sizes. Arrays are contiguous, float32, and not copied.

    Args:
        blocks: the pairs of each block's layers and norms, by the names in `_LAYERS`.
        norm, head: the layers after the blocks.
        epsilon, is_rms, activation: settings of all blocks.
        sizes: those in `_SIZES` that are the same in each step.
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
        """The argument of `Library.decode`; `arrays` must live until it has run."""
        addresses = [_address(arrays[name]) for name in _ARRAYS]
        counts = [(self._sizes | sizes)[name] for name in _SIZES]
        return np.array([self._blocks.ctypes.data, *self._ends, *addresses, *counts, *self._settings], np.int64)


def _address(array: np.ndarray | None) -> int:
    if array is None:
        return 0
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return array.ctypes.data
