"""Token files: one folder with the tokens of the training and validation documents, ready to be memory-mapped.

```
train.bin validation.bin   token ids, one after the other, little-endian uint8, uint16 or uint32
train.offsets              where each document begins, and the end of the last one, little-endian int64
index.json                 dtype, vocabulary, end-of-document token and names of the splits
tokenizer.json             read by libai.data.load_tokenizer
```
Every document ends with the end-of-document token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from libai.data.errors import DataError, describe_folder
from libai.data.tokenizers import Tokenizer

FORMAT = 3


@dataclass(frozen=True)
class TokenIndex:
    """The content of `index.json`."""

    dtype: str
    vocab_size: int
    end_of_document: int
    splits: list[str]
    format: int = FORMAT


def write_index(folder: Path, tokenizer: Tokenizer, splits: Iterable[str]) -> None:
    """Complete a folder whose `.bin` files are written."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    index = TokenIndex(dtype.name, tokenizer.vocab_size, tokenizer.end_of_document, list(splits))
    tokenizer.save(folder)
    (folder / "index.json").write_text(json.dumps(asdict(index)), encoding="utf-8")


class SplitWriter:
    """Writes the two files of one split, as documents come."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype):
        self._dtype = dtype.newbyteorder("<")
        self._tokens = (folder / f"{split}.bin").open("wb")
        self._offsets = (folder / f"{split}.offsets").open("wb")
        self.num_tokens = 0
        self.num_documents = 0
        self._offsets.write(np.zeros(1, "<i8").tobytes())

    def add(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Documents of these lengths, one after the other, each with its end-of-document token."""
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._offsets.write((self.num_tokens + np.cumsum(lengths)).astype("<i8").tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths)

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
            "make them with `libai preprocess`, or use libai.data.build_text_dataset(...) with text files."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == FORMAT:
            return TokenIndex(**content)
        found = f"format {content['format']}, and this version reads {FORMAT}"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        found = str(error)
    raise DataError(f"{path} cannot be read ({found}): delete the folder and prepare it again.")


def open_split(folder: Path, split: str, index: TokenIndex) -> tuple[np.ndarray, np.ndarray]:
    """Map the tokens of a split, `(num_tokens,)`, and where its documents begin, with the end, `(documents + 1,)`.

    Nothing is copied into memory. Raises `DataError` for an unknown split, and for files that are missing or do not
    belong together.
    """
    if split not in index.splits:
        raise DataError(f"split={split!r} was asked for and {folder} holds {sorted(index.splits)}: use one of them.")
    path = folder / f"{split}.bin"
    try:
        tokens = np.memmap(path, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")
        offsets = np.memmap(path.with_suffix(".offsets"), dtype="<i8", mode="r")
        if offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) > 0).all():
            return tokens, offsets
        found = f"{len(tokens)} tokens, and documents up to {offsets[-1]}"
    except (OSError, ValueError) as error:  # a file that is missing, empty or cut off
        found = str(error)
    raise DataError(f"{path} or its .offsets is damaged ({found}): delete the folder {folder} and prepare it again.")


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds an index and every file that it lists."""
    try:
        index = read_index(folder)
        for split in index.splits:
            open_split(folder, split, index)
    except DataError:
        return False
    return (folder / "tokenizer.json").is_file()


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The unsigned integers that hold all ids."""
    return np.min_scalar_type(vocab_size - 1)
