"""Token files: one folder with the tokens of the training and validation documents, ready to be memory-mapped.

```
train.bin validation.bin   token ids, one after the other, little-endian uint8, uint16 or uint32
train.offsets              where each document begins, and the end of the last one, little-endian int64
index.json                 dtype, vocabulary and per split: numbers of tokens and documents, sha256, names of documents
tokenizer.json             read by libai.data.load_tokenizer
verified.json              size, times and inode of each file when its content was last compared with its sha256
```
Every document ends with the end-of-document token. A file that was changed since is compared again when it is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.loading.errors import DataError, describe_folder
from libai.data.text.tokenizers import Tokenizer
from libai.utils.rank_notes import note_progress

FORMAT = 2
_CHUNK_TOKENS = 2**22
#: (path, stamp) of files compared by this process, for folders that nothing can be written into
_verified: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class SplitIndex:
    """What one `.bin` file holds; `documents` are the files that they were read from, or nothing."""

    num_tokens: int
    sha256: str
    num_documents: int
    documents: list[str] = field(default_factory=list)


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
    dtype, written = smallest_dtype(tokenizer.vocab_size), {}
    for split, documents in splits.items():
        with SplitWriter(folder, split, dtype) as writer:
            for tokens in tokenizer.encode_files([source for _, source in documents]):
                writer.add(np.append(tokens, tokenizer.end_of_document), [len(tokens) + 1])
                note_progress()
        written[split] = writer.index([name for name, _ in documents])
    write_index(folder, tokenizer, written)
    return written


def write_index(folder: Path, tokenizer: Tokenizer, splits: dict[str, SplitIndex]) -> None:
    """Complete a folder whose `.bin` files are written."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    index = TokenIndex(dtype.name, tokenizer.vocab_size, tokenizer.end_of_document, splits)
    tokenizer.save(folder)
    (folder / "index.json").write_text(json.dumps(asdict(index)), encoding="utf-8")
    for split in splits:
        _note_verified(folder / f"{split}.bin", _stamp(folder / f"{split}.bin", index, split))


class SplitWriter:
    """Writes the two files of one split, as documents come."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype):
        self._dtype = dtype.newbyteorder("<")
        self._tokens = (folder / f"{split}.bin").open("wb")
        self._offsets = (folder / f"{split}.offsets").open("wb")
        self._digest = hashlib.sha256()
        self.num_tokens = self.num_documents = 0
        self._offsets.write(np.zeros(1, "<i8").tobytes())

    def add(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Documents of these lengths, one after the other, each with its end-of-document token."""
        data = tokens.astype(self._dtype).tobytes()
        self._digest.update(data)
        self._tokens.write(data)
        self._offsets.write((self.num_tokens + np.cumsum(lengths)).astype("<i8").tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths)

    def index(self, documents: list[str] | None = None) -> SplitIndex:
        """What was written."""
        return SplitIndex(self.num_tokens, self._digest.hexdigest(), self.num_documents, documents or [])

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._tokens.close()
        self._offsets.close()


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
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete the folder and prepare it again.") from error


def open_tokens(folder: Path, split: str, index: TokenIndex) -> np.ndarray:
    """The tokens of a split, memory-mapped and read-only, `(num_tokens,)`; nothing is copied into memory.

    Raises `DataError` for an unknown split and for a file that is missing, has the wrong size, or is not what was
    written. The content is read for that only when the file has changed since it was compared last.
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
    tokens = _map(path, index, num_tokens)
    stamp = _stamp(path, index, split)
    if not _is_verified(path, stamp):
        damage = _find_damage(tokens, index, split)
        if damage:
            raise DataError(f"{path} is damaged ({damage}): delete the folder {folder} and prepare it again.")
        _note_verified(path, stamp)
    return tokens


def open_offsets(folder: Path, split: str, index: TokenIndex) -> np.ndarray:
    """Where the documents of a split begin, and the end of the last one, int64 `(documents + 1,)`, memory-mapped.

    Raises `DataError` when they do not belong to the split's tokens.
    """
    path, entry = folder / f"{split}.offsets", index.splits[split]
    if path.is_file() and path.stat().st_size == 8 * (entry.num_documents + 1):
        offsets = np.memmap(path, dtype="<i8", mode="r")
        if offsets[0] == 0 and offsets[-1] == entry.num_tokens and (np.diff(offsets) > 0).all():
            return offsets
    raise DataError(f"{path} is missing or damaged: delete the folder {folder} and prepare it again.")


def is_complete(folder: Path) -> bool:
    """True when `folder` holds an index and every file that it lists, with the content that was written."""
    try:
        index = read_index(folder)
        for split in index.splits:
            open_tokens(folder, split, index)
            open_offsets(folder, split, index)
    except DataError:
        return False
    return (folder / "tokenizer.json").is_file()


def _map(path: Path, index: TokenIndex, num_tokens: int) -> np.ndarray:
    if num_tokens == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=index.dtype)
    return np.memmap(path, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")


def _find_damage(tokens: np.ndarray, index: TokenIndex, split: str) -> str:
    """What is wrong with the tokens of a split, "" when nothing is; reads all of them, a part at a time."""
    digest, largest = hashlib.sha256(), -1
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        part = np.ascontiguousarray(tokens[start : start + _CHUNK_TOKENS])
        digest.update(part.data)
        largest = max(largest, int(part.max()))
    if digest.hexdigest() != index.splits[split].sha256:
        return "its SHA-256 is not the one in index.json"
    if largest >= index.vocab_size:
        return f"it holds the token id {largest}, and index.json says vocab_size={index.vocab_size}"
    return ""


def _stamp(path: Path, index: TokenIndex, split: str) -> str:
    """What changes when the content of a file may have: its times (ctime cannot be set back), size and inode, and what
    it was compared with."""
    status = path.stat()
    seen = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return f"{'-'.join(map(str, seen))}-{index.splits[split].sha256}-{index.vocab_size}"


def _is_verified(path: Path, stamp: str) -> bool:
    return (str(path), stamp) in _verified or _read_stamps(path.parent).get(path.name) == stamp


def _read_stamps(folder: Path) -> dict[str, str]:
    try:
        stamps = json.loads((folder / "verified.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or somebody is writing
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _note_verified(path: Path, stamp: str) -> None:
    _verified.add((str(path), stamp))
    stamps = {**_read_stamps(path.parent), path.name: stamp}
    temporary = path.with_name(f".verified-{os.getpid()}.json")
    with contextlib.suppress(OSError):  # a folder that is read-only: the next process compares again
        temporary.write_text(json.dumps(stamps), encoding="utf-8")
        temporary.replace(path.with_name("verified.json"))


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The unsigned integers that hold all ids."""
    return np.min_scalar_type(vocab_size - 1)
