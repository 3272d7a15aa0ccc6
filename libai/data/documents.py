"""Documents of many files, JSON lines or plain text, to token files, by several processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from libai.data.cache import prepare_once
from libai.data.errors import DataError
from libai.data.token_files import SplitWriter, is_complete, smallest_dtype, write_index
from libai.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

_CHUNK_BYTES = 2**20
_CHUNKS_AHEAD = 4  # for each process


@dataclass(frozen=True)
class Preprocessed:
    """The outcome of `preprocess`: documents (empty ones left out), tokens with the ends of documents, bytes read."""

    folder: Path
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Chunk:
    """Consecutive documents of one file: lines of JSON, or texts."""

    file: Path
    first_line: int
    documents: list[bytes]


#: bytes read, and split -> tokens of its documents and their lengths
_Encoded = tuple[int, dict[str, tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class _Encoder:
    """Reads documents, divides them into splits and encodes them; sent to other processes."""

    key: str
    validation_fraction: float
    folder: Path = Path()
    end_of_document: int = 0

    def texts(self, chunk: _Chunk) -> Iterator[str]:
        """The texts of a chunk. Raises `DataError` with the line of what is not a document."""
        for number, document in enumerate(chunk.documents, chunk.first_line):
            text = self._text_of_json(chunk.file, number, document) if _is_json(chunk.file) else _decode(document)
            if text.strip():
                yield text

    def _text_of_json(self, file: Path, number: int, line: bytes) -> str:
        if not line.strip():
            return ""
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number}: not JSON ({error}).") from None
        if not isinstance(row, dict) or not isinstance(row.get(self.key), str):
            found = sorted(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise DataError(
                f"{file}, line {number}: no text {self.key!r} in it, only {found}. Name the key of the text."
            )
        return _decode(row[self.key].encode("utf-8", "replace"))  # half a surrogate pair has no bytes

    def split_of(self, text: str) -> str:
        """The split of a document, by the hash of its text: equal documents are never in both."""
        place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
        return "validation" if place < self.validation_fraction else "train"

    def encode(self, chunk: _Chunk) -> _Encoded:
        """The tokens of a chunk's documents by split."""
        texts = list(self.texts(chunk))
        found: dict[str, list[np.ndarray]] = {}
        for text, tokens in zip(texts, _loaded(self.folder, self.end_of_document).encode_batch(texts)):
            found.setdefault(self.split_of(text), []).append(np.append(tokens, self.end_of_document))
        splits = {
            split: (np.concatenate(documents), np.array([len(tokens) for tokens in documents]))
            for split, documents in found.items()
        }
        return sum(map(len, chunk.documents)), splits


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
    num_processes: int = 1,
    note: Callable[[Preprocessed], None] = lambda done: None,
) -> Preprocessed:
    """Write the documents of `files` as token files into `folder`, which `TokenDataset` reads.

    Args:
        files: `.jsonl` (`.json`) has a document in each line, an object with the text at `key`. Any other file is a
            document; with `blank_lines` each of its paragraphs is one.
        folder: a new one.
        tokenizer: "bytes", "bpe" with a `vocab_size`, learnt from the training documents, or a `tokenizer.json`.
        end_token: what ends a document where the vocabulary has no usual name for it.
        validation_fraction: share of the documents that validate, chosen by the hash of their text.
        num_processes: that encode; the result does not depend on it.
        note: called with what has been done so far.

    Raises `DataError` for what cannot be read, with its line; then nothing is left in `folder`.
    """
    paths, target, start = [Path(file) for file in files], Path(folder), time.perf_counter()
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is not a file. Give files of text, or .jsonl.")
    if not paths or target.exists() or num_processes < 1 or not 0 <= validation_fraction < 1:
        raise DataError(
            f"preprocess({len(paths)} files, {target}{' (exists)' if target.exists() else ''}, num_processes="
            f"{num_processes}, validation_fraction={validation_fraction}): give at least one file, a new folder, at "
            "least one process and a fraction of at least 0 and below 1."
        )
    reading = _Encoder(key, validation_fraction)
    done = Preprocessed(target)

    def write(temporary: Path) -> None:
        nonlocal done
        texts = (text for chunk in _chunks(paths, blank_lines) for text in reading.texts(chunk))
        training = (text for text in texts if reading.split_of(text) == "train")
        made = make_tokenizer(tokenizer, vocab_size, training, end_token)
        made.save(temporary)
        splits = ("train", "validation") if validation_fraction else ("train",)
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(SplitWriter(temporary, split, smallest_dtype(made.vocab_size)))
                for split in splits
            }
            encoder = replace(reading, folder=temporary, end_of_document=made.end_of_document)
            for num_bytes, encoded in _encode_all(_chunks(paths, blank_lines), encoder, num_processes):
                for split, (tokens, lengths) in encoded.items():
                    writers[split].add(tokens, lengths)
                done = Preprocessed(
                    target,
                    sum(writer.num_documents for writer in writers.values()),
                    sum(writer.num_tokens for writer in writers.values()),
                    done.bytes + num_bytes,
                    time.perf_counter() - start,
                )
                note(done)
        empty = [split for split, writer in writers.items() if not writer.num_documents]
        if empty:
            raise DataError(
                f"no document is left for {empty[0]} (of {done.documents}): give more documents, or "
                "validation_fraction=0 for no validation split."
            )
        write_index(temporary, made, writers)

    prepare_once(target, is_complete, write)
    return done


# ---------------------------------------------------------------------------------------------------- reading


def _chunks(paths: Iterable[Path], blank_lines: bool) -> Iterator[_Chunk]:
    """The documents of all files, about a megabyte at a time."""
    for path in paths:
        documents: list[bytes] = []
        first, size = 1, 0
        for number, document in enumerate(_documents(path, blank_lines), 1):
            documents.append(document)
            size += len(document)
            if size >= _CHUNK_BYTES:
                yield _Chunk(path, first, documents)
                documents, first, size = [], number + 1, 0
        if documents:
            yield _Chunk(path, first, documents)


def _documents(path: Path, blank_lines: bool) -> Iterator[bytes]:
    if not _is_json(path) and not blank_lines:
        yield path.read_bytes()
        return
    with path.open("rb") as lines:
        if _is_json(path):
            yield from lines
            return
        paragraph: list[bytes] = []
        for line in lines:
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield b"".join(paragraph)
                paragraph = []
        yield b"".join(paragraph)


def _is_json(path: Path) -> bool:
    return path.suffix in (".jsonl", ".json")


def _decode(document: bytes) -> str:
    return document.decode("utf-8", errors="replace")


# ---------------------------------------------------------------------------------------------------- encoding


@lru_cache(maxsize=1)
def _loaded(folder: Path, end_of_document: int) -> Tokenizer:
    """Read once by each process."""
    return load_tokenizer(folder, end_of_document)


def _encode_all(chunks: Iterable[_Chunk], encoder: _Encoder, num_processes: int) -> Iterator[_Encoded]:
    """Every chunk encoded, in order; by other processes if there is more than one, a few chunks ahead."""
    if num_processes == 1:
        yield from map(encoder.encode, chunks)
        return
    context = multiprocessing.get_context("spawn")  # threads of this process may hold locks
    waiting: deque[Future[_Encoded]] = deque()
    with ProcessPoolExecutor(num_processes, context, _prepare_process) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(encoder.encode, chunk))
                if len(waiting) >= num_processes * _CHUNKS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a process that encodes has ended: killed, out of memory, or a script that starts processes outside of "
                "`if __name__ == '__main__':`. Take fewer processes, or 1."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_process() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as were asked for
