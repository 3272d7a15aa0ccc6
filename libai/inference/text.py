"""Tokenizers for inference: those of `libai.data`, and tokenizer.json files of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.data import load_tokenizer
from libai.utils.errors import UserError


class TextCodec:
    """`encode(text) -> token ids` and `decode(ids) -> text`; `stop_token` ends a text (a list: each of them does), None
    where none is known."""

    def __init__(self, tokenizer: Any, stop_token: int | list[int] | None):
        self.tokenizer, self.stop_token = tokenizer, stop_token

    @classmethod
    def of_data(cls, tokenizer: Any) -> TextCodec:
        """The tokenizer of a run's token files."""
        return cls(tokenizer, tokenizer.end_of_document)

    @classmethod
    def read(cls, path: Path) -> TextCodec:
        """From a tokenizer.json, or a folder with one. The stop token is in the config.json next to it."""
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            if json.loads(file.read_text(encoding="utf-8")).get("type") == "bytes":
                return cls.of_data(load_tokenizer(folder))
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{file} cannot be read as a tokenizer ({error}). Give a tokenizer.json.") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ends_document = tokenizer.token_to_id("<|endofdocument|>")
        return cls(tokenizer, _stop_token(folder) if ends_document is None else ends_document)

    def encode(self, text: str, max_length: int | None = None) -> list[int]:
        """The ids of `text`, with the special tokens that the tokenizer adds, cut to `max_length`."""
        found = self.tokenizer.encode(text)
        if isinstance(found, list):
            return found[:max_length]
        if max_length is not None:
            found.truncate(max_length)
        return found.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self.tokenizer.decode(list(ids))


class TextStream:
    """The text of tokens that come one by one: `add(token)` returns what is new. A character of several tokens is
    returned when its last one is there."""

    def __init__(self, codec: TextCodec):
        self._codec = codec
        self._tokens: list[int] = []
        self._length = 0

    def add(self, token: int) -> str:
        """The text that `token` completes."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._take(text)

    def end(self) -> str:
        """The rest of the text: an incomplete character."""
        return self._take(self._codec.decode(self._tokens))

    def _take(self, text: str) -> str:
        new, self._length = text[self._length :], len(text)
        return new


def _stop_token(folder: Path) -> int | list[int] | None:
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            token = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if token is not None:
                return token
    return None
