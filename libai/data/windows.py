"""Windows of a long token sequence as samples for a causal language model.

The tokens come from libai's token files, or from the `.bin` and `.idx` files of Megatron-LM and
LiBai.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from libai.data.errors import DataError
from libai.data.token_files import open_split, read_index
from libai.data.tokenizers import Tokenizer, load_tokenizer
from libai.utils.sizes import check_known, check_range, check_sizes

#: header of Megatron-LM's index: magic number, version, integer type, number of sequences, number
#: of documents
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
#: type codes with the same meaning in Megatron-LM and LiBai
_MEGATRON_KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class TokenWindows:
    """Windows of `sequence_length + 1` tokens, split into `input_ids` and `labels`, which are
    shifted by one token.

    Each window begins where the input of the previous window ended, so no token is predicted twice.
    Windows cross document boundaries, which are marked by the end-of-document token. A tail shorter
    than a window is dropped.

    Args:
        tokens: token ids, `(num_tokens,)`, memory-mapped or not.
        offsets: start of each document, followed by the end of the last document.
        name: source of the tokens, for error messages.

    Raises `DataError` if there are too few tokens for a single window.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, sequence_length: int, name: str):
        check_sizes(DataError, sequence_length=sequence_length)
        if len(tokens) <= sequence_length:
            raise DataError(
                f"sequence_length={sequence_length} needs windows of {sequence_length + 1} "
                f"tokens, but {name} has {len(tokens)} tokens: use a smaller sequence_length or "
                "more text."
            )
        self.tokens, self.offsets, self.sequence_length = tokens, offsets, sequence_length
        # A view of shape (all windows, sequence_length + 1). Indexing its rows copies whole
        # windows, about 3x as fast as indexing tokens with a 2-D index (measured, 8 x 1024 uint16
        # tokens).
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)[
            ::sequence_length
        ]

    def __len__(self) -> int:
        return len(self._windows)

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows at `indices`: `input_ids` and `labels`, int64 `(len(indices),
        sequence_length)`.
        """
        windows = self._windows[indices]
        inputs = windows[..., :-1].astype(np.int64)
        return {"input_ids": inputs, "labels": windows[..., 1:].astype(np.int64)}

    __getitem__ = get_batch  # one index selects a window without the first axis


class TokenDataset(TokenWindows):
    """Windows of one split of a folder made by `libai preprocess` or `build_text_dataset`, see
    `TokenWindows`.
    """

    def __init__(self, path: str | os.PathLike, sequence_length: int, split: str = "train"):
        self.path = Path(path).expanduser()
        self.index = read_index(self.path)
        tokens, offsets = open_split(self.path, split, self.index)
        super().__init__(tokens, offsets, sequence_length, f"the {split} split of {self.path}")

    @property
    def vocab_size(self) -> int:
        """Number of token ids.

        A model needs at least this many embeddings (OneFlow 0.9 does not check ids).
        """
        return self.index.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, loaded from the folder."""
        return load_tokenizer(self.path, self.index.end_of_document)


class MegatronDataset(TokenWindows):
    """Windows of the documents in `path` (with or without `.bin`), see `TokenWindows`.

    The last `validation_fraction` of the documents form the split "validation", the others "train".
    No document is in both, and nothing depends on a seed. `vocab_size` is the vocabulary size of
    the model; the files do not contain it.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        sequence_length: int,
        split: str = "train",
        *,
        validation_fraction: float = 0.05,
        vocab_size: int | None = None,
    ):
        self.path = Path(str(Path(path).expanduser()).removesuffix(".bin").removesuffix(".idx"))
        check_known("split", split, ("train", "validation"), DataError)
        check_range("0 <= x < 1", DataError, validation_fraction=validation_fraction)
        self.vocab_size = vocab_size
        tokens, offsets = read_megatron(self.path)
        first = len(offsets) - 1 - round(validation_fraction * (len(offsets) - 1))
        offsets = offsets[: first + 1] if split == "train" else offsets[first:]
        start, end = (offsets[0], offsets[-1]) if len(offsets) else (0, 0)
        name = f"the {split} split of {self.path}.bin"
        super().__init__(tokens[start:end], offsets - start, sequence_length, name)


def read_megatron(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map the tokens of `path`.bin, and return them with the document offsets, int64
    (documents + 1,).

    The last offset is the end of the last document. The index `path`.idx has the layout of
    `MMapIndexedDataset`, version 1: the header, then the length (int32) and the byte offset (int64)
    of every sequence, then the first sequence of every document (int64). Raises `DataError` for
    files that are missing, damaged or do not belong together.
    """
    index = path.with_name(path.name + ".idx")
    data = path.with_name(path.name + ".bin")
    for file in (index, data):
        if not file.is_file():
            raise DataError(
                f"{file} does not exist: pass the common path of a .bin and an .idx file without "
                "the suffix."
            )
    content = index.read_bytes()
    head = content[: _MEGATRON_HEADER.size].ljust(_MEGATRON_HEADER.size, b"\0")
    magic, version, kind, num_sequences, num_documents = _MEGATRON_HEADER.unpack(head)
    if magic != b"MMIDIDX\0\0" or version != 1 or kind not in _MEGATRON_KINDS:
        raise DataError(
            f"{index} begins with {magic!r}, version {version} and numbers of kind {kind}. Only "
            "files of Megatron-LM's MMapIndexedDataset (MMIDIDX), version 1, with numbers of kind "
            f"{', '.join(map(str, _MEGATRON_KINDS))} can be read."
        )
    dtype = np.dtype(_MEGATRON_KINDS[kind])
    places = len(content) - 12 * num_sequences - 8 * num_documents
    if places == _MEGATRON_HEADER.size:
        lengths = np.frombuffer(content, "<i4", num_sequences, places)
        documents = np.frombuffer(content, "<i8", num_documents, places + 12 * num_sequences)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        first = np.append(documents, num_sequences)
        if (
            data.stat().st_size == ends[-1] * dtype.itemsize
            and first.min() >= 0
            and first.max() <= num_sequences
        ):
            tokens = np.memmap(data, dtype, mode="r") if ends[-1] else np.empty(0, dtype)
            return tokens, ends[np.unique(first)]
    raise DataError(
        f"{data} has {data.stat().st_size} bytes, which does not match the {num_sequences} "
        f"sequences in {num_documents} documents of {index}: the files do not belong together, or "
        "one is damaged. Copy them again."
    )
