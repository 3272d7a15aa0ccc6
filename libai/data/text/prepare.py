"""Text files to token files: which files, split by file, tokenised once, reused while the files are unchanged."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from libai.data.loading.cache import default_cache_dir, prepare_once
from libai.data.loading.errors import DataError
from libai.data.text.token_files import FORMAT, is_complete, write_token_files
from libai.data.text.tokenizers import ByteTokenizer, find_tokenizer, make_tokenizer, read_text
from libai.data.text.windows import TokenDataset

_logger = logging.getLogger(__name__)

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}

_KINDS = ("bytes", "bpe")

Document = tuple[str, Path]


def prepare_tokens(
    files: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    name: str = "text",
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = 0.05,
    cache_dir: str | os.PathLike | None = None,
) -> Path:
    """Tokenise text files into a folder for `TokenDataset` and return the folder; the second call finds it ready.

    `files`: one or several paths or glob patterns (`**` goes into folders). Whole files are assigned to training or
    validation by the hash of their relative path; of files with equal content only the first is kept, so no validation
    text occurs as a training file. `tokenizer`: `"bytes"`, `"bpe"` with a `vocab_size`, trained on the training
    files alone, or the path of a `tokenizer.json`. The folder lies in `cache_dir` (default `$LIBAI_DATA_DIR` or
    `~/.cache/libai`) and is named after a digest of the options and of every file's path, size and time of change. Any
    number of ranks may call at once.
    Raises `DataError` for no files, too few files to split, or options that do not go together.
    """
    return _prepare(_matching_files(files), name, tokenizer, vocab_size, validation_fraction, cache_dir)


def prepare_stdlib_tokens(
    *,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = 0.05,
    include_tests: bool = False,
    cache_dir: str | os.PathLike | None = None,
) -> Path:
    """Tokenise the Python standard library's own source text (about 11 MB, no download), see `prepare_tokens`.

    The text differs between Python versions: losses are comparable only under the same interpreter.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = _NOT_STDLIB if include_tests else _NOT_STDLIB | _TEST_FOLDERS
    paths = [path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts)]
    if not paths:
        raise DataError(
            f"the standard library was looked for in {root}, which holds no .py files (a stripped or zipped Python?): "
            "use prepare_tokens(...) with text files of your own."
        )
    return _prepare(_named(paths, root), "stdlib", tokenizer, vocab_size, validation_fraction, cache_dir)


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
    """One split (`"train"` or `"validation"`) of your own text files; arguments as in `prepare_tokens`."""
    path = prepare_tokens(
        files,
        name=name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_fraction=validation_fraction,
        cache_dir=cache_dir,
    )
    return TokenDataset(path, sequence_length, split)


def build_stdlib_dataset(
    *,
    sequence_length: int,
    split: str = "train",
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = 0.05,
    include_tests: bool = False,
    cache_dir: str | os.PathLike | None = None,
) -> TokenDataset:
    """One split (`"train"` or `"validation"`) of the standard library's text, see `prepare_stdlib_tokens`."""
    path = prepare_stdlib_tokens(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_fraction=validation_fraction,
        include_tests=include_tests,
        cache_dir=cache_dir,
    )
    return TokenDataset(path, sequence_length, split)


def _prepare(
    documents: list[Document],
    name: str,
    tokenizer: str,
    vocab_size: int | None,
    validation_fraction: float,
    cache_dir: str | os.PathLike | None,
) -> Path:
    _check_options(tokenizer, vocab_size, validation_fraction)
    options = {"tokenizer": tokenizer, "vocab_size": vocab_size, "validation_fraction": validation_fraction}
    if tokenizer not in _KINDS:
        options["tokenizer"] = hashlib.sha256(find_tokenizer(tokenizer).read_bytes()).hexdigest()
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = root / f"{name}-{_fingerprint(documents, options)}"

    def write(temporary: Path) -> None:
        splits = split_by_file(_without_copies(documents), validation_fraction)
        made = make_tokenizer(tokenizer, vocab_size, (read_text(path) for _, path in splits["train"]))
        written = write_token_files(temporary, made, splits)
        for split, index in written.items():
            _logger.info("%s %s: %d files, %d tokens", name, split, len(index.documents), index.num_tokens)

    return prepare_once(folder, is_complete, write)


def split_by_file(documents: Sequence[Document], validation_fraction: float) -> dict[str, list[Document]]:
    """`{"train": [...], "validation": [...]}`: the files whose names hash lowest are for validation, at least one.

    Raises `DataError` when one file would have to be in both. `validation_fraction=0`: no validation split.
    """
    if validation_fraction == 0:
        return {"train": list(documents)}
    num_validation = max(1, round(validation_fraction * len(documents)))
    if num_validation >= len(documents):
        raise DataError(
            f"validation_fraction={validation_fraction} of {len(documents)} different file(s) leaves none to train on; "
            "the split is by whole files. Give more files, or validation_fraction=0 for no validation split."
        )
    by_hash = sorted(documents, key=lambda document: hashlib.sha256(document[0].encode()).digest())
    chosen = {name for name, _ in by_hash[:num_validation]}
    return {
        "train": [document for document in documents if document[0] not in chosen],
        "validation": [document for document in documents if document[0] in chosen],
    }


def _matching_files(patterns: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Document]:
    listed = [patterns] if isinstance(patterns, (str, os.PathLike)) else list(patterns)
    paths: set[Path] = set()
    for pattern in listed:
        full = os.path.abspath(os.path.expanduser(pattern))
        matches = [Path(match) for match in glob.glob(full, recursive=True)]
        found = [path for path in matches if path.is_file()]
        if not found:
            hint = f'a folder, add "/**/*.txt": {pattern}/**/*.txt' if matches else "no file"
            raise DataError(f"text files were asked for as {str(pattern)!r} (that is {full}) and this matches {hint}.")
        paths.update(found)
    if not paths:
        raise DataError("no text files were given: pass paths or glob patterns, e.g. files='corpus/**/*.txt'.")
    root = os.path.commonpath([path.parent for path in paths])
    return _named(paths, Path(root))


def _named(paths: Iterable[Path], root: Path) -> list[Document]:
    """The files with their names relative to `root`, sorted by name."""
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)


def _without_copies(documents: Iterable[Document]) -> list[Document]:
    """The documents that are not empty and not equal to an earlier one."""
    first_with_content: dict[bytes, Document] = {}
    for document in documents:
        content = document[1].read_bytes()
        if content:
            first_with_content.setdefault(hashlib.sha256(content).digest(), document)
    return list(first_with_content.values())


def _fingerprint(documents: Iterable[Document], options: dict) -> str:
    """A digest of the options and of every file's path, size and time of change; reads no file content."""
    stats = [(name, stat.st_size, stat.st_mtime_ns) for name, path in documents for stat in [path.stat()]]
    text = json.dumps([FORMAT, options, stats], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_options(tokenizer: str, vocab_size: int | None, validation_fraction: float) -> None:
    if tokenizer == "bytes" and vocab_size not in (None, ByteTokenizer.vocab_size):
        raise DataError(
            f'vocab_size={vocab_size} was asked for with tokenizer="bytes", which always has '
            f'{ByteTokenizer.vocab_size} tokens: leave it out, or use tokenizer="bpe".'
        )
    if tokenizer == "bpe" and vocab_size is None:
        raise DataError('tokenizer="bpe" needs to know how many tokens to learn: add vocab_size, e.g. 4096.')
    if tokenizer not in _KINDS and vocab_size is not None:
        raise DataError(f"vocab_size={vocab_size} was asked for with {tokenizer}, which has its own: leave it out.")
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction} is not a share of the files: use 0 <= share < 1.")
