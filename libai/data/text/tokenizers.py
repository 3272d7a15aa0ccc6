"""Two tokenizers that need no download: bytes as they are, and byte-level BPE trained on the spot.

Both have `vocab_size`, `end_of_document` (a token id), `encode(text) -> list[int]`, `decode(ids) -> str`, and
`encode_files(paths)` for preparing token files. They are stored as JSON, so loading one runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from libai.data.loading.errors import DataError

_END_OF_DOCUMENT = "<|endofdocument|>"
_FILES_PER_BATCH = 64


class Tokenizer(Protocol):
    """What token files and text generation need from a tokenizer."""

    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without an end-of-document token."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; end-of-document tokens are left out."""

    def encode_files(self, paths: Sequence[Path]) -> Iterator[np.ndarray]:
        """The token ids of every file in order, 1-D integer arrays without an end-of-document token."""

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into `folder`, to be read by `load_tokenizer`."""


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and 256 for the end of a document.

    >>> ByteTokenizer().encode("né"), ByteTokenizer().decode([110, 195, 169, 256])
    ([110, 195, 169], 'né')
    """

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become the replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode_files(self, paths: Sequence[Path]) -> Iterator[np.ndarray]:
        """The bytes of every file, uint8."""
        for path in paths:
            yield np.frombuffer(path.read_bytes(), dtype=np.uint8)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into `folder`."""
        (folder / "tokenizer.json").write_text(json.dumps({"type": "bytes"}))


class BPETokenizer:
    """Byte-level byte-pair encoding by the `tokenizers` library; every text can be encoded and comes back the same."""

    def __init__(self, model: Any):
        self._model = model
        self.vocab_size: int = model.get_vocab_size()
        self.end_of_document: int = model.token_to_id(_END_OF_DOCUMENT)

    @classmethod
    def train(cls, paths: Sequence[Path], vocab_size: int) -> BPETokenizer:
        """Learn the merges from the text files at `paths`; small texts may give fewer than `vocab_size` tokens.

        Raises `DataError` when `vocab_size` cannot hold the 256 bytes and the end-of-document token.
        """
        if vocab_size < 257:
            raise DataError(
                f"vocab_size={vocab_size} is too small for BPE, which starts from 256 bytes and an end-of-document "
                'token: use 257 or more, or tokenizer="bytes".'
            )
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator((_read_text(path) for path in paths), trainer)
        return cls(model)

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`."""
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self._model.decode(list(ids), skip_special_tokens=True)

    def encode_files(self, paths: Sequence[Path]) -> Iterator[np.ndarray]:
        """The token ids of every file, uint32; several files at a time, on all cores."""
        for start in range(0, len(paths), _FILES_PER_BATCH):
            texts = [_read_text(path) for path in paths[start : start + _FILES_PER_BATCH]]
            for encoding in self._model.encode_batch(texts, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into `folder`, in the format of the `tokenizers` library."""
        self._model.save(str(folder / "tokenizer.json"))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`. Raises `DataError` when there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist: prepare the folder again with libai.data.prepare_tokens(...).")
    if json.loads(path.read_text(encoding="utf-8")).get("type") == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as Model

    return BPETokenizer(Model.from_file(str(path)))


def _read_text(path: Path) -> str:
    # Not read_text: it would turn every line end into "\n".
    return path.read_bytes().decode("utf-8", errors="replace")
