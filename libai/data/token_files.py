"""Token files: one folder with the tokens of the training and validation documents, ready to be memory-mapped.

```
train.bin validation.bin   token ids, one after the other, little-endian uint8, uint16 or uint32
index.json                 dtype, vocabulary and per split: number of tokens, sha256, documents and where they begin
tokenizer.json             read by libai.data.load_tokenizer
```
Every document ends with the end-of-document token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.errors import DataError, describe_folder
from libai.data.tokenizers import Tokenizer

FORMAT = 1


@dataclass(frozen=True)
class SplitIndex:
    """What one `.bin` file holds. Document i is `tokens[offsets[i]:offsets[i + 1]]`, read from `documents[i]`."""

    num_tokens: int
    sha256: str
    documents: list[str]
    offsets: list[int]


@dataclass(frozen=True)
class TokenIndex:
    """The content of `index.json`."""

    dtype: str
    vocab_size: int
    end_of_document: int
    splits: dict[str, SplitIndex]
    format: int = FORMAT

    @property
    def item_bytes(self) -> int:
        """Bytes per token on disk."""
        return np.dtype(self.dtype).itemsize


def write_token_files(
    folder: Path, tokenizer: Tokenizer, splits: Mapping[str, Sequence[tuple[str, Path]]]
) -> dict[str, SplitIndex]:
    """Tokenise the `(name, path)` documents of every split into `folder`, one document in memory at a time."""
    dtype = _smallest_dtype(tokenizer.vocab_size)
    written = {
        split: _write_split(folder / f"{split}.bin", tokenizer, documents, dtype) for split, documents in splits.items()
    }
    index = TokenIndex(dtype.name, tokenizer.vocab_size, tokenizer.end_of_document, written)
    tokenizer.save(folder)
    (folder / "index.json").write_text(json.dumps(asdict(index)), encoding="utf-8")
    return written


def read_index(folder: Path) -> TokenIndex:
    """The index of a folder of token files. Raises `DataError` when there is none or it cannot be read."""
    path = folder / "index.json"
    if not path.is_file():
        raise DataError(
            f"token files were asked for in {folder}, which {describe_folder(folder)} and has no index.json: "
            "make them with libai.data.prepare_tokens(...), which returns the folder to give here."
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise DataError(f"{path} has format {content['format']}, this version reads {FORMAT}: prepare it again.")
        content["splits"] = {name: SplitIndex(**split) for name, split in content["splits"].items()}
        return TokenIndex(**content)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete the folder and prepare it again.") from error


def open_tokens(folder: Path, split: str, index: TokenIndex) -> np.ndarray:
    """The tokens of a split, memory-mapped and read-only, `(num_tokens,)`; nothing is copied into memory.

    Raises `DataError` for an unknown split and for a file that is missing or has the wrong size.
    """
    if split not in index.splits:
        raise DataError(f"split={split!r} was asked for and {folder} holds {sorted(index.splits)}: use one of them.")
    path, num_tokens = folder / f"{split}.bin", index.splits[split].num_tokens
    expected = num_tokens * index.item_bytes
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found} bytes"
        raise DataError(
            f"{path} {state} where index.json says {expected} bytes: delete the folder and prepare it again."
        )
    if num_tokens == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=index.dtype)
    return np.memmap(path, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")


def is_complete(folder: Path) -> bool:
    """True when `folder` holds an index and every file that it lists, each of the right size."""
    try:
        index = read_index(folder)
        for split in index.splits:
            open_tokens(folder, split, index)
    except DataError:
        return False
    return (folder / "tokenizer.json").is_file()


def verify_token_files(folder: Path) -> list[str]:
    """Read every `.bin` file and compare its SHA-256 with the index; the names of the damaged files."""
    index = read_index(folder)
    damaged = []
    for split, expected in index.splits.items():
        tokens = open_tokens(folder, split, index)
        if hashlib.sha256(tokens.tobytes()).hexdigest() != expected.sha256:
            damaged.append(f"{split}.bin")
    return damaged


def _write_split(
    path: Path, tokenizer: Tokenizer, documents: Sequence[tuple[str, Path]], dtype: np.dtype
) -> SplitIndex:
    digest, offsets = hashlib.sha256(), [0]
    with path.open("wb") as file:
        for tokens in tokenizer.encode_files([source for _, source in documents]):
            data = np.append(tokens, tokenizer.end_of_document).astype(dtype.newbyteorder("<")).tobytes()
            digest.update(data)
            file.write(data)
            offsets.append(offsets[-1] + len(tokens) + 1)
    return SplitIndex(offsets[-1], digest.hexdigest(), [name for name, _ in documents], offsets)


def _smallest_dtype(vocab_size: int) -> np.dtype:
    return np.min_scalar_type(vocab_size - 1)
