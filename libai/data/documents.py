"""Convert documents from JSON lines or plain text files into token files."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from libai.data.cache import prepare_once
from libai.data.errors import DataError
from libai.data.token_files import is_complete, write_token_files
from libai.utils.sizes import check_range


@dataclass(frozen=True)
class Preprocessed:
    """The result of `preprocess`: the number of non-empty documents, the number of tokens, and the
    time in seconds.
    """

    folder: Path
    documents: int
    tokens: int
    seconds: float


def preprocess(
    files: Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    *,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    end_token: str | None = None,
    key: str = "text",
    blank_lines: bool = False,
    validation_fraction: float = 0.05,
    note: Callable[[Preprocessed], None] = lambda done: None,
) -> Preprocessed:
    """Write the documents of `files` as token files into `folder`, which `TokenDataset` reads.

    Args:
        files: paths. A `.jsonl` or `.json` file has one document per line: a JSON object with the
            text under `key`. Any other file is one document, or one document per paragraph with
            `blank_lines`.
        folder: output folder, which must not exist yet.
        tokenizer: "bytes"; "bpe" with a `vocab_size`, trained on the training documents; or the
            path of a `tokenizer.json`. The last two encode on all cores.
        end_token: token that ends a document (default: the first of the usual names in the
            vocabulary).
        validation_fraction: fraction of documents in the validation split (default 0.05). They are
            chosen by the hash of their text, so equal documents are never in both splits.
        note: called with the progress so far.

    Raises `DataError` with the line of a document that cannot be read. In that case nothing is left
    in `folder`.
    """
    paths = [Path(file) for file in files]
    target = Path(folder)
    start = time.perf_counter()
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is not a file. Give text files or .jsonl files.")
    check_range("0 <= x < 1", DataError, validation_fraction=validation_fraction)
    if not paths or target.exists():
        raise DataError(
            f"preprocess({len(paths)} files, {target}{' (exists)' if target.exists() else ''}): "
            "give at least one file and a new folder."
        )
    done = Preprocessed(target, 0, 0, 0.0)

    def documents() -> Iterator[tuple[str, str]]:
        for path in paths:
            for text in _texts(path, key, blank_lines):
                if text.strip():
                    yield _split_of(text, validation_fraction), text

    def note_counts(num_documents: int, num_tokens: int) -> None:
        nonlocal done
        done = Preprocessed(target, num_documents, num_tokens, time.perf_counter() - start)
        note(done)

    def write(temporary: Path) -> None:
        splits = ("train", "validation") if validation_fraction else ("train",)
        write_token_files(
            temporary, documents, splits, tokenizer, vocab_size, end_token, note_counts
        )

    prepare_once(target, is_complete, write)
    return done


def _split_of(text: str, validation_fraction: float) -> str:
    place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
    return "validation" if place < validation_fraction else "train"


def _texts(path: Path, key: str, blank_lines: bool) -> Iterator[str]:
    """Yield the documents of a file.

    Raises `DataError` for a file that is not text, or with the line of a document.
    """
    with path.open("rb") as lines:
        if (
            b"\0" in lines.peek()
        ):  # bytes that are not UTF-8 are replaced, but this would replace most of them
            raise DataError(
                f"{path} is not text: it contains zero bytes. Decompress it, or save it as UTF-8."
            )
        if path.suffix in (".jsonl", ".json"):
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of_json(path, number, line, key)
        elif not blank_lines:
            yield _decoded(lines.read())
        else:
            paragraph = []
            for line in lines:
                if line.strip():
                    paragraph.append(line)
                elif paragraph:
                    yield _decoded(b"".join(paragraph))
                    paragraph = []
            yield _decoded(b"".join(paragraph))


def _text_of_json(path: Path, number: int, line: bytes, key: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error}).") from None
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        found = sorted(row) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DataError(
            f"{path}, line {number}: there is no text {key!r}, only {found}. Set the key of the "
            "text."
        )
    return _decoded(
        row[key].encode("utf-8", "replace")
    )  # half of a surrogate pair cannot be encoded


def _decoded(document: bytes) -> str:
    return document.decode("utf-8", errors="replace")
