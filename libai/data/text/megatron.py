"""Token files of Megatron-LM and LiBai: `NAME.bin` with the ids of all documents, `NAME.idx` with where they are.

The layout of the index is that of `MMapIndexedDataset` in Megatron-LM, version 1: a magic number, the version and the
kind of integers; how many sequences and documents; the length and the place of every sequence; the first sequence of
every document.
"""

from __future__ import annotations

import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.loading.errors import DataError
from libai.data.text.windows import TokenWindows

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
#: both systems agree on the integers of these codes
_KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronDataset(TokenWindows):
    """Windows of the documents of `path` (with or without `.bin`), see `TokenWindows`.

    The last `validation_fraction` of the documents are the split "validation", the others "train": no document is in
    both, and nothing depends on a seed. `vocab_size` is what the model has; the files do not say it.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        sequence_length: int,
        split: str = "train",
        *,
        validation_fraction: float = 0.05,
        vocab_size: int | None = None,
        stride: int | None = None,
    ):
        self.path = Path(str(Path(path).expanduser()).removesuffix(".bin").removesuffix(".idx"))
        if split not in ("train", "validation") or not 0 <= validation_fraction < 1:
            raise DataError(
                f"split={split!r}, validation_fraction={validation_fraction}: the splits are train and validation, and "
                "the fraction of the documents that validate is at least 0 and below 1."
            )
        self._again = partial(
            MegatronDataset, validation_fraction=validation_fraction, vocab_size=vocab_size, stride=stride
        )
        self.split, self.vocab_size = split, vocab_size
        tokens, offsets = read_megatron(self.path)
        first = len(offsets) - 1 - round(validation_fraction * (len(offsets) - 1))
        offsets = offsets[: first + 1] if split == "train" else offsets[first:]
        start, end = (offsets[0], offsets[-1]) if len(offsets) else (0, 0)
        name = f"the {split} split of {self.path}.bin"
        super().__init__(tokens[start:end], offsets - start, sequence_length, stride, name)

    def __reduce__(self) -> Any:
        """A copy in another process maps the file again; the tokens are not sent."""
        return self._again, (self.path, self.sequence_length, self.split)


def read_megatron(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of `path`.bin, memory-mapped, and where its documents begin, with the end, int64 (documents + 1,).

    Raises `DataError` for files that are missing, damaged or do not belong together.
    """
    index, data = path.with_name(path.name + ".idx"), path.with_name(path.name + ".bin")
    missing = [file for file in (index, data) if not file.is_file()]
    if missing:
        raise DataError(f"{missing[0]} does not exist: give the common name of a .bin and an .idx file.")
    content = index.read_bytes()
    head = _HEADER.unpack(content[: _HEADER.size]) if len(content) >= _HEADER.size else (b"",)
    if head[0] != _MAGIC:
        raise DataError(f"{index} is no index of tokens: it begins with {content[:9]!r} and needs {_MAGIC!r}.")
    if head[1] != 1 or head[2] not in _KINDS:
        raise DataError(
            f"{index} has version {head[1]} and numbers of kind {head[2]}; version 1 and the kinds of integers, "
            f"{', '.join(map(str, _KINDS))}, are read."
        )
    _, _, kind, num_sequences, num_documents = head
    if len(content) != _HEADER.size + 12 * num_sequences + 8 * num_documents:
        raise DataError(f"{index} has {len(content)} bytes, which {num_sequences} sequences do not take: copy it anew.")
    lengths = np.frombuffer(content, "<i4", num_sequences, _HEADER.size)
    pointers = np.frombuffer(content, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_documents, _HEADER.size + 12 * num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    dtype = np.dtype(_KINDS[kind])
    if not np.array_equal(pointers, ends[:-1] * dtype.itemsize) or data.stat().st_size != ends[-1] * dtype.itemsize:
        raise DataError(
            f"{data} has {data.stat().st_size} bytes, and {index} tells of {ends[-1]} tokens of {dtype.itemsize} bytes "
            "one after the other: the two do not belong together, or one is damaged."
        )
    if documents.size == 0 or documents.min() < 0 or documents.max() > num_sequences:
        raise DataError(f"{index} names documents that begin outside of its {num_sequences} sequences.")
    tokens = np.memmap(data, dtype, mode="r") if ends[-1] else np.empty(0, dtype)
    return tokens, ends[np.unique(np.append(documents, num_sequences))]
