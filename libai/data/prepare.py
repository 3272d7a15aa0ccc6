"""Convert text files to token files.

Whole files are assigned to one split. They are tokenized once, and the result is reused until a
file changes.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from libai.data.cache import default_cache_dir, prepare_once
from libai.data.errors import DataError
from libai.data.token_files import FORMAT, is_complete, write_token_files
from libai.data.tokenizers import find_tokenizer, read_text
from libai.data.windows import TokenDataset
from libai.utils.sizes import check_range

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Document = tuple[str, Path]


def build_text_dataset(
    files: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    sequence_length: int,
    split: str = "train",
    name: str = "text",
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = 0.05,
    cache_dir: str | os.PathLike | None = None,
) -> TokenDataset:
    """Tokenize text files into a cached folder, unless it exists already, and return one split of
    it.

    Args:
        files: one or several paths or glob patterns (`**` matches nested folders). Whole files are
            assigned to training or validation by the hash of their relative path. Of files with
            equal content only the first is kept, so no validation text is also trained on.
        split: `"train"` or `"validation"`.
        tokenizer: `"bytes"`; `"bpe"` with a `vocab_size`, trained on the training files only; or
            the path of a `tokenizer.json`.
        cache_dir: parent of the folder (default `$LIBAI_DATA_DIR` or `~/.cache/libai`). The folder
            is named after a digest of the options and of every file's path, size and modification
            time.

    Any number of ranks may call this at once. Raises `DataError` if there are no files, too few
    files to split, or conflicting options.
    """
    documents = _matching_files(files)
    check_range("0 <= x < 1", DataError, validation_fraction=validation_fraction)
    options = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "validation_fraction": validation_fraction,
    }
    if tokenizer not in ("bytes", "bpe"):
        options["tokenizer"] = hashlib.sha256(find_tokenizer(tokenizer).read_bytes()).hexdigest()
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()

    def write(temporary: Path) -> None:
        splits = ("train", "validation") if validation_fraction else ("train",)
        pairs = _split_by_file(_without_copies(documents), validation_fraction)

        def texts() -> Iterator[tuple[str, str]]:
            return ((split, read_text(path)) for split, path in pairs)

        write_token_files(temporary, texts, splits, tokenizer, vocab_size)

    folder = prepare_once(root / f"{name}-{_fingerprint(documents, options)}", is_complete, write)
    return TokenDataset(folder, sequence_length, split)


def build_stdlib_dataset(
    *, sequence_length: int, split: str = "train", **options: Any
) -> TokenDataset:
    """Build a text dataset from the source of the Python standard library, without its tests.

    The source is about 11 MB and needs no download. See `build_text_dataset` for the options. The
    text differs between Python versions, so losses are comparable only under the same interpreter.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path for path in root.rglob("*.py") if _NOT_STDLIB.isdisjoint(path.relative_to(root).parts)
    ]
    if not paths:
        raise DataError(
            f"{root} should contain the standard library, but has no .py files (a stripped or "
            "zipped Python?): use build_text_dataset(...) with your own text files."
        )
    return build_text_dataset(
        paths, sequence_length=sequence_length, split=split, name="stdlib", **options
    )


def _split_by_file(documents: list[Document], validation_fraction: float) -> list[tuple[str, Path]]:
    """Return the split, "train" or "validation", and the path of each document.

    Validation gets the files with the lowest hash of their name, at least one unless
    `validation_fraction=0`. Raises `DataError` if no file would be left for training.
    """
    num_validation = (
        max(1, round(validation_fraction * len(documents))) if validation_fraction else 0
    )
    if num_validation >= len(documents):
        raise DataError(
            f"validation_fraction={validation_fraction} of {len(documents)} different, non-empty "
            "file(s) leaves none for training, because files are not split. Use more files, or "
            "validation_fraction=0 for no validation split."
        )
    names = [name for name, _ in documents]
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen = set(by_hash[:num_validation])
    return [("validation" if name in chosen else "train", path) for name, path in documents]


def _matching_files(patterns: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Document]:
    listed = [patterns] if isinstance(patterns, (str, os.PathLike)) else list(patterns)
    paths = set()
    for pattern in listed:
        full = os.path.abspath(os.path.expanduser(pattern))
        matches = [Path(match) for match in glob.glob(full, recursive=True)]
        found = [path for path in matches if path.is_file()]
        if not found:
            hint = f'a folder, add "/**/*.txt": {pattern}/**/*.txt' if matches else "no file"
            raise DataError(
                f"expected text files at {str(pattern)!r} (that is {full}), but this matches "
                f"{hint}."
            )
        paths.update(found)
    if not paths:
        raise DataError(
            "no text files were given: pass paths or glob patterns, e.g. files='corpus/**/*.txt'."
        )
    root = os.path.commonpath([path.parent for path in paths])
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)


def _without_copies(documents: Iterable[Document]) -> list[Document]:
    """Return the documents that are neither empty nor equal to an earlier one."""
    first_with_content: dict[bytes, Document] = {}
    for document in documents:
        content = document[1].read_bytes()
        if content:
            first_with_content.setdefault(hashlib.sha256(content).digest(), document)
    return list(first_with_content.values())


def _fingerprint(documents: Iterable[Document], options: dict) -> str:
    """Return a digest of the options and of every file's path, size and modification time.

    No file content is read.
    """
    stats = [
        (name, stat.st_size, stat.st_mtime_ns) for name, path in documents for stat in [path.stat()]
    ]
    text = json.dumps([FORMAT, options, stats], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
