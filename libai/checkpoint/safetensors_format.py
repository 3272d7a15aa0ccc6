"""The safetensors container (huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header, raw data.

Written and read here rather than with the `safetensors` package for three reasons: a header made from shapes alone lets
tensors stream through one at a time; bfloat16, which numpy lacks, stays bfloat16; and plain reads of a file that
somebody truncates end in an error, where a memory map ends in SIGBUS. Tests hold both directions against the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.strict_json import parse_json

#: logical dtype -> (name in the file, numpy dtype of the raw data). numpy has no bfloat16: its bits travel as uint16.
DTYPES: dict[str, tuple[str, np.dtype]] = {
    "float64": ("F64", np.dtype("<f8")),
    "float32": ("F32", np.dtype("<f4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype("<u2")),
    "int64": ("I64", np.dtype("<i8")),
    "int32": ("I32", np.dtype("<i4")),
    "int16": ("I16", np.dtype("<i2")),
    "int8": ("I8", np.dtype("i1")),
    "uint64": ("U64", np.dtype("<u8")),
    "uint32": ("U32", np.dtype("<u4")),
    "uint16": ("U16", np.dtype("<u2")),
    "uint8": ("U8", np.dtype("u1")),
    "bool": ("BOOL", np.dtype("?")),
}
FLOATING = ("float64", "float32", "float16", "bfloat16")
_LOGICAL = {code: name for name, (code, _) in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package itself
MAX_DIMENSIONS = 32  # of numpy 1.x


@dataclass(frozen=True)
class TensorSpec:
    """Logical dtype and shape of one tensor, as in `("bfloat16", (10, 768))`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the raw data in a file."""
        return math.prod(self.shape) * DTYPES[self.dtype][1].itemsize


@dataclass(frozen=True)
class Slot:
    """Where a tensor's raw data lie: `num_bytes` of its spec from byte `offset` of the file."""

    spec: TensorSpec
    offset: int


def build_header(specs: Mapping[str, TensorSpec]) -> bytes:
    """The bytes before the data, for tensors that follow in the order of `specs` without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # what Hugging Face readers expect to see
    begin = 0
    for name, spec in specs.items():
        end = begin + spec.num_bytes
        header[name] = {"dtype": DTYPES[spec.dtype][0], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # so that the data start aligned
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO, file_bytes: int, what: str) -> dict[str, Slot]:
    """Where every tensor of an open safetensors file lies, by name.

    Raises `CheckpointError` unless the header is strict JSON and its tensors cover the data exactly: no gap, no
    overlap, nothing outside, byte counts that follow from dtype and shape.
    """
    prefix = file.read(8)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{what} is not a safetensors file: a header of {header_bytes} bytes in a file of {file_bytes}."
        )
    text = file.read(header_bytes)
    if len(text) < header_bytes:
        raise CheckpointError(f"{what} ends inside its header: {len(text)} of {header_bytes} bytes are there.")
    header = parse_json(text, f"the header of {what}")
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {what} is a {type(header).__name__}, not an object of tensors.")
    header.pop("__metadata__", None)
    spans = {name: _parse_entry(entry, f"{what}: tensor {name[:80]!r}") for name, entry in header.items()}
    position, data_start = 0, 8 + header_bytes
    for name, (spec, begin, end) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if begin != position:
            raise CheckpointError(
                f"{what}: tensor {name[:80]!r} begins at byte {begin} of the data, expected {position}."
            )
        if end - begin != spec.num_bytes:
            raise CheckpointError(
                f"{what}: tensor {name[:80]!r} has {end - begin} bytes, {spec.dtype} {spec.shape} needs "
                f"{spec.num_bytes}."
            )
        position = end
    if data_start + position != file_bytes:
        raise CheckpointError(f"{what} holds {file_bytes - data_start} bytes of data, its header describes {position}.")
    return {name: Slot(spec, data_start + begin) for name, (spec, begin, _) in spans.items()}


def parse_shape(value: object, what: str) -> tuple[int, ...]:
    """A list of dimensions from a file as a tuple. Raises `CheckpointError` for anything numpy could not hold."""
    if not isinstance(value, list) or not all(_is_count(size) for size in value) or len(value) > MAX_DIMENSIONS:
        raise CheckpointError(f"{what} has the shape {str(value)[:80]}, which is not a list of dimensions.")
    if math.prod(max(1, size) for size in value) >= 2**60:  # also for shapes with a 0 in them, which need no data
        raise CheckpointError(f"{what} has the absurd shape {str(value)[:80]}.")
    return tuple(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(entry: object, what: str) -> tuple[TensorSpec, int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what} is not described by exactly dtype, shape and data_offsets.")
    dtype, offsets = entry["dtype"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _LOGICAL:
        raise CheckpointError(f"{what} has the dtype {str(dtype)[:40]!r}; known: {', '.join(sorted(_LOGICAL))}.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{what} has data_offsets {str(offsets)[:80]}, expected [begin, end].")
    return TensorSpec(_LOGICAL[dtype], parse_shape(entry["shape"], what)), offsets[0], offsets[1]


def to_raw(array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` as the contiguous little-endian raw data of `dtype`; no copy when it is that already."""
    if dtype == "bfloat16" and array.dtype != np.uint16:
        return _round_to_bfloat16(array)
    return np.ascontiguousarray(array, dtype=DTYPES[dtype][1])


def raw_bytes(raw: np.ndarray) -> memoryview:
    """The bytes of contiguous raw data, without a copy."""
    return raw.reshape(-1).view(np.uint8).data


def from_raw(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw data as the array a caller sees; bfloat16 becomes the float32 of the same values."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw


def _round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
