"""Tokenizers that need no download: plain bytes, and byte-level BPE that is trained here or read
from a file.

Both have `vocab_size`, `end_of_document` (a token id), `encode(text) -> list[int]`, `decode(ids) ->
str`, and `encode_batch(texts)` for preparing token files. They are stored as JSON, so loading one
runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.errors import DataError
from libai.utils.atomic import read_json

_END_OF_DOCUMENT = "<|endofdocument|>"
_END_TOKENS = (
    _END_OF_DOCUMENT,
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|im_end|>",
    "[SEP]",
)


class ByteTokenizer:
    """A tokenizer with UTF-8 bytes as tokens 0..255, and 256 for the end of a document.

    >>> ByteTokenizer().encode("né"), ByteTokenizer().decode([110, 195, 169, 256])
    ([110, 195, 169], 'né')
    """

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become the replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of every text, as uint8 arrays."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into `folder`."""
        (folder / "tokenizer.json").write_text(json.dumps({"type": "bytes"}))


class BPETokenizer:
    """A tokenizer of the `tokenizers` library: trained here, or read from the `tokenizer.json` of a
    published model.

    Tokenizers trained here use byte-level byte-pair encoding, which decodes every text without
    loss.

    `end_token`: token that ends a document; by default the first of the usual names that is in the
    vocabulary.
    """

    def __init__(self, model: Any, end_token: str | None = None):
        self._model = model
        self.vocab_size = model.get_vocab_size()
        names = _END_TOKENS if end_token is None else (end_token,)
        found = [number for number in map(model.token_to_id, names) if number is not None]
        if not found:
            raise DataError(
                f"the vocabulary has no token {' or '.join(names)} to end documents with: choose "
                "one of its tokens, such as a separator (end_token, --end-token)."
            )
        self.end_of_document = found[0]

    @classmethod
    def load(cls, path: Path, end_token: str | None = None) -> BPETokenizer:
        """Read a `tokenizer.json`. Raises `DataError` for any other file."""
        from tokenizers import Tokenizer as Model

        try:
            return cls(Model.from_file(str(path)), end_token)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        except Exception as error:  # the library raises no narrower type
            raise DataError(
                f"{path} is not a tokenizer.json of the tokenizers library: {error}."
            ) from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Train on `texts`. A small corpus may give fewer than `vocab_size` tokens.

        Raises `DataError` if `vocab_size` is too small for the 256 bytes and the end-of-document
        token, or so large that the trainer, which reserves memory for every token, would end the
        process.
        """
        if not 257 <= vocab_size <= 10_000_000:
            raise DataError(
                f"vocab_size={vocab_size} does not suit BPE, which starts from 256 bytes and an "
                "end-of-document token "
                'and reserves memory for every token: use 257 to 10,000,000, or tokenizer="bytes".'
            )
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        return cls(model)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self._model.decode(list(ids), skip_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of every text, as uint32 arrays. Runs on all cores."""
        encodings = self._model.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into `folder`, in the format of the `tokenizers` library."""
        self._model.save(str(folder / "tokenizer.json"))


Tokenizer = ByteTokenizer | BPETokenizer


def make_tokenizer(
    kind: str, vocab_size: int | None, texts: Iterable[str], end_token: str | None = None
) -> Tokenizer:
    """Return the tokenizer of this `kind`: "bytes", "bpe" trained on `texts`, or the path of a
    `tokenizer.json`.

    Raises `DataError` if the tokenizer cannot be made.
    """
    if kind == "bpe":
        if vocab_size is None:
            raise DataError(
                'tokenizer="bpe" needs the number of tokens to learn: add vocab_size, e.g. 4096.'
            )
        return BPETokenizer.train(texts, vocab_size)
    made = (
        ByteTokenizer() if kind == "bytes" else BPETokenizer.load(find_tokenizer(kind), end_token)
    )
    if vocab_size not in (None, made.vocab_size):
        raise DataError(
            f"vocab_size={vocab_size} does not apply to tokenizer={kind!r}, which always has "
            f"{made.vocab_size} "
            'tokens: remove it, or use tokenizer="bpe".'
        )
    return made


def load_tokenizer(folder: Path, end_of_document: int | None = None) -> Tokenizer:
    """Return the tokenizer saved in `folder`.

    `end_of_document` is the id of the token that ends documents, if known.

    Raises `DataError` if there is none.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist: prepare the folder again.")
    if read_json(path).get("type") == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as Model

    model = Model.from_file(str(path))
    return BPETokenizer(
        model, None if end_of_document is None else model.id_to_token(end_of_document)
    )


def find_tokenizer(spec: str) -> Path:
    """Return the path of a tokenizer.json. `spec` is that path or the path of its folder.

    Raises `DataError` if the file is missing.
    """
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f'tokenizer={spec!r} is neither "bytes", "bpe" nor the path of a tokenizer.json.'
        )
    return path


def read_text(path: Path) -> str:
    """Return the text of a file. Bytes that are not UTF-8 become the replacement character."""
    # Not Path.read_text, which would convert every line ending to "\n".
    return path.read_bytes().decode("utf-8", errors="replace")
