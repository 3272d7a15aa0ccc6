"""Token files: one folder with the tokens of the training and validation documents, ready to be
memory-mapped.

```
train.bin validation.bin   token ids, one after the other, little-endian uint8, uint16 or uint32
train.offsets              where each document begins, and the end of the last one, little-endian int64
index.json                 dtype, vocabulary, end-of-document token and names of the splits
tokenizer.json             read by libai.data.load_tokenizer
```
Every document ends with the end-of-document token.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from libai.data.errors import DataError, describe_folder
from libai.data.tokenizers import make_tokenizer
from libai.utils.rank_notes import note_progress

_logger = logging.getLogger(__name__)

FORMAT = 3
_BATCH_CHARACTERS = 2**20


@dataclass(frozen=True)
class TokenIndex:
    """The content of `index.json`."""

    dtype: str
    vocab_size: int
    end_of_document: int
    splits: list[str]
    format: int = FORMAT


def write_token_files(
    folder: Path,
    documents: Callable[[], Iterable[tuple[str, str]]],
    splits: Sequence[str],
    tokenizer: str,
    vocab_size: int | None = None,
    end_token: str | None = None,
    note: Callable[[int, int], None] = lambda num_documents, num_tokens: None,
) -> None:
    """Write documents as token files into the empty folder `folder`.

    Args:
        documents: returns (split, text) of each document. It is called twice if "bpe" is trained on
            the training documents.
        tokenizer, vocab_size, end_token: as in `make_tokenizer`.
        note: called with the number of documents and the number of tokens so far.

    Raises `DataError` if one of `splits` stays empty.
    """
    made = make_tokenizer(
        tokenizer, vocab_size, (text for split, text in documents() if split == "train"), end_token
    )
    dtype = np.min_scalar_type(made.vocab_size - 1)
    kind = dtype.newbyteorder("<")
    offsets = {split: array("q", [0]) for split in splits}
    with ExitStack() as stack:
        files = {
            split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in splits
        }
        for batch in _batches(documents()):
            encoded = made.encode_batch([text for _, text in batch])
            for (split, _), tokens in zip(batch, encoded):
                document = np.append(tokens, made.end_of_document).astype(kind)
                files[split].write(document.tobytes())
                offsets[split].append(offsets[split][-1] + len(document))
            num_documents = sum(map(len, offsets.values())) - len(splits)
            note(num_documents, sum(ends[-1] for ends in offsets.values()))
            note_progress()
    for split, ends in offsets.items():
        if len(ends) == 1:
            raise DataError(
                f"no document is left for {split}: use more documents, or validation_fraction=0 "
                "for no validation split."
            )
        np.asarray(ends, "<i8").tofile(folder / f"{split}.offsets")
        _logger.info("%s: %d documents, %d tokens", split, len(ends) - 1, ends[-1])
    made.save(folder)
    index = TokenIndex(dtype.name, made.vocab_size, made.end_of_document, list(splits))
    (folder / "index.json").write_text(json.dumps(asdict(index)), encoding="utf-8")


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of about a million characters, which tokenizer libraries encode on all
    cores.
    """
    batch = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def read_index(folder: Path) -> TokenIndex:
    """Return the index of a folder of token files.

    Raises `DataError` if it is missing or cannot be read.
    """
    path = folder / "index.json"
    if not path.is_file():
        raise DataError(
            f"expected token files in {folder}, which {describe_folder(folder)} and has no "
            "index.json: create them with `libai preprocess`, or use "
            "libai.data.build_text_dataset(...) with text files."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == FORMAT:
            return TokenIndex(**content)
        found = f"format {content['format']}, but this version reads {FORMAT}"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        found = str(error)
    raise DataError(f"{path} cannot be read ({found}): delete the folder and prepare it again.")


def open_split(folder: Path, split: str, index: TokenIndex) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map the tokens of a split, `(num_tokens,)`, and the offsets of its documents,
    `(documents + 1,)`.

    The last offset is the end of the last document. Nothing is copied into memory. Raises
    `DataError` for an unknown split, and for files that are missing or do not belong together.
    """
    if split not in index.splits:
        raise DataError(
            f"split={split!r} is not in {folder}, which has {sorted(index.splits)}: use one of "
            "them."
        )
    path = folder / f"{split}.bin"
    try:
        tokens = np.memmap(path, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")
        offsets = np.memmap(path.with_suffix(".offsets"), dtype="<i8", mode="r")
        if offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) > 0).all():
            return tokens, offsets
        found = f"{len(tokens)} tokens, but documents up to {offsets[-1]}"
    except (OSError, ValueError) as error:  # a file that is missing, empty or truncated
        found = str(error)
    raise DataError(
        f"{path} or its .offsets is damaged ({found}): delete the folder {folder} and prepare it "
        "again."
    )


def is_complete(folder: Path) -> bool:
    """Return whether `folder` contains an index and every file that it lists."""
    try:
        index = read_index(folder)
        for split in index.splits:
            open_split(folder, split, index)
    except DataError:
        return False
    return (folder / "tokenizer.json").is_file()
