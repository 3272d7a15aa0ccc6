"""Docstrings of the standard library as pairs of views: the same text twice, or its two halves."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_VALIDATION_SHARE = 0.15
_MIN_WORDS = 8


@functools.cache
def docstrings() -> dict[str, list[list[str]]]:
    """Return split ("train" or "validation") -> the words of each docstring.

    Each file is in only one split.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[list[str]]] = {"train": [], "validation": []}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            is_validation = (
                hashlib.sha256("/".join(parts).encode()).digest()[0] < 256 * _VALIDATION_SHARE
            )
            found["validation" if is_validation else "train"] += _docstrings_of(path)
    return found


def build_dataset(
    split: str, views: str, length: int = 32, vocab_size: int = 8192
) -> dict[str, np.ndarray]:
    """Return `input_ids` and `attention_mask`, both (texts, 2, length) int64.

    With `views="same"`, the two views are the same text and differ only by dropout. With
    `"halves"`, they are the words before and after the middle. The id of a word is a hash; 0 is
    padding.
    """
    ids, seen = [], set()
    for words in docstrings()[split]:
        middle = len(words) // 2
        pair = (words, words) if views == "same" else (words[:middle], words[middle:])
        rows = np.zeros((2, length), np.int64)
        for row, part in zip(rows, pair):
            numbers = [1 + zlib.crc32(word.encode()) % (vocab_size - 1) for word in part[:length]]
            row[: len(numbers)] = numbers
        if rows.tobytes() not in seen:  # inherited methods repeat their docstrings
            seen.add(rows.tobytes())
            ids.append(rows)
    stacked = np.stack(ids)
    return {"input_ids": stacked, "attention_mask": (stacked > 0).astype(np.int64)}


def _docstrings_of(path: Path) -> Iterator[list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escape sequences in old code
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        except SyntaxError:  # a template, or an example of a syntax error
            return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words = re.findall(r"\w+", (ast.get_docstring(node) or "").lower())
            if len(words) >= _MIN_WORDS:
                yield words
