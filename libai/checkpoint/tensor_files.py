"""Read and write tensor files with the package `safetensors` (huggingface.co/docs/safetensors).

numpy has no bfloat16. Files store its bits as uint16, and callers get a float32 array with the same
values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors

from libai.checkpoint.durable import FileRecord, write_file
from libai.checkpoint.errors import CheckpointError, reading

#: logical dtype, named as in numpy -> name in a safetensors header, in the order of a file
CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
FLOATING = ("float64", "float32", "float16", "bfloat16")
_LOGICAL = {code: name for name, code in CODES.items()}
_MAX_DIMENSIONS = 32  # limit of numpy 1.x
HUGGING_FACE = {"format": "pt"}  # metadata that `transformers` expects


@dataclass(frozen=True)
class TensorSpec:
    """Logical dtype and shape of one tensor, as in `("bfloat16", (10, 768))`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def raw_dtype(self) -> np.dtype:
        """The numpy dtype of the raw data in a file."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the raw data in a file."""
        return math.prod(self.shape) * self.raw_dtype.itemsize

    def fits(self, other: TensorSpec) -> bool:
        """Return True if the values can be copied to `other`: the same shape, and the same or two
        floating dtypes.
        """
        is_floating = self.dtype in FLOATING and other.dtype in FLOATING
        return self.shape == other.shape and (self.dtype == other.dtype or is_floating)


def spec_of(tensor: Any) -> TensorSpec:
    """Return the dtype and shape of a numpy array or a oneflow tensor."""
    is_array = isinstance(tensor, (np.ndarray, np.generic))
    dtype = tensor.dtype.newbyteorder("=") if is_array else tensor.dtype
    return TensorSpec(
        str(dtype).removeprefix("oneflow."), tuple(int(size) for size in tensor.shape)
    )


@dataclass(frozen=True)
class Slot:
    """The location of a tensor's raw data: `spec.num_bytes` bytes from `offset` in a file of the
    same folder.
    """

    file: str
    offset: int
    spec: TensorSpec


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] = HUGGING_FACE,
) -> FileRecord:
    """Write a file into a folder that its caller renames or removes, and return its record.

    The bytes are those that the package would write: tensors with wide types come first, so that
    all are aligned. Arrays that already have the file's dtype and byte order are not copied. Raises
    `OSError`, and `CheckpointWriteError` if the file has other bytes than the memory.
    """
    dtypes = list(CODES)
    order = sorted(specs, key=lambda name: (dtypes.index(specs[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        spec = specs[name]
        start = end
        end += spec.num_bytes
        header[name] = {
            "dtype": CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = [_to_raw(arrays[name], specs[name]).reshape(-1).view(np.uint8).data for name in order]
    return write_file(path, [len(text).to_bytes(8, "little"), text, *raw])


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises `CheckpointError`."""
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise CheckpointError(f"{path} is not a regular file.")
    with reading(path):
        return open(path, "rb")


def read_slots(path: Path) -> dict[str, Slot]:
    """Return tensor name -> slot for a safetensors file.

    Raises `CheckpointError` unless the header is valid and its tensors cover the data exactly.
    """
    with open_file(path) as file, reading(path):
        try:
            with safetensors.safe_open(path, "numpy"):  # validates the whole header
                pass
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        except (safetensors.SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a valid safetensors file: {error}. It is damaged or of another "
                "format. PyTorch writes such files with safetensors.torch.save_file."
            ) from None
    header.pop("__metadata__", None)
    slots = {}
    for name, entry in header.items():
        spec = TensorSpec(_LOGICAL.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
        if spec.dtype not in CODES or len(spec.shape) > _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{path}: numpy has no {spec.dtype} {spec.shape} for tensor {name[:80]!r}."
            )
        slots[name] = Slot(path.name, 8 + length + entry["data_offsets"][0], spec)
    return slots


def read_tensor(file: BinaryIO, slot: Slot) -> np.ndarray:
    """Read one tensor from its open file. Raises `CheckpointError`."""
    raw = np.empty(slot.spec.shape, slot.spec.raw_dtype)
    with reading(file.name):
        file.seek(slot.offset)
        num_read = file.readinto(raw.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
    if num_read < raw.nbytes:
        raise CheckpointError(f"{file.name} is truncated: it ends before the data of a tensor.")
    if slot.spec.dtype == "bfloat16":
        return widened(raw)
    return raw


def widened(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bits."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def _to_raw(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Return `array` as contiguous raw data in native (little-endian) byte order.

    Copies only if necessary.
    """
    if spec.dtype == "bfloat16" and array.dtype != np.uint16:
        return _round_to_bfloat16(array)
    return np.ascontiguousarray(array, dtype=spec.raw_dtype)


def _round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Return the upper 16 bits of float32 values, rounded to nearest even. NaN stays NaN."""
    values = np.ascontiguousarray(array, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
