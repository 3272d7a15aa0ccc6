"""The arguments of the native step of generation (src/decode.h), made of NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_LINEARS = ("attention_norm", "q", "k", "v", "out", "mlp_norm", "gate", "up", "down")
_ARRAYS = ("cos", "sin", "mask", "x", "keys", "values", "scores")
_SIZES = ("num_blocks", "rows", "hidden", "heads", "kv_heads", "head_size", "inner", "vocabulary", "capacity", "length")

#: weight and bias, None for one that there is not
Pair = tuple[Any, Any]


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER)]


class _Block(ctypes.Structure):
    _fields_ = [(name, _Linear) for name in _LINEARS]


class _Step(ctypes.Structure):
    _fields_ = [
        ("blocks", _POINTER),
        ("norm", _Linear),
        ("head", _Linear),
        *((name, _POINTER) for name in _ARRAYS),
        *((name, _SIZE) for name in _SIZES),
        ("epsilon", ctypes.c_double),
        ("is_rms", _SIZE),
        ("activation", _SIZE),
    ]


class DecoderWeights:
    """The weights of a decoder and its sizes. Arrays are contiguous, float32, and not copied.

    Args:
        blocks: of each block the pairs of its layers and norms, by the names of `DecoderBlock`.
        norm, head: what follows the blocks.
        settings: the sizes and settings of `DecoderStep` that are the same in each step.
    """

    def __init__(self, blocks: Sequence[Mapping[str, Pair]], norm: Pair, head: Pair, **settings: float):
        self._kept = [blocks, norm, head]
        self._blocks = (_Block * len(blocks))(*(_Block(*(_linear(block.get(n)) for n in _LINEARS)) for block in blocks))
        self._common = {"norm": _linear(norm), "head": _linear(head), "num_blocks": len(blocks), **settings}

    def step(self, arrays: Mapping[str, np.ndarray | None], **sizes: int) -> ctypes.Structure:
        """The argument of `Library.decode`; `arrays` must live until it has run."""
        pointers = {name: _address(array) for name, array in arrays.items()}
        return _Step(blocks=ctypes.addressof(self._blocks), **pointers, **sizes, **self._common)


def _linear(pair: Pair | None) -> _Linear:
    return _Linear(*map(_address, pair or (None, None)))


def _address(array: np.ndarray | None) -> int | None:
    if array is None:
        return None
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return array.ctypes.data
