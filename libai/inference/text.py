"""Tokenizers for inference: libai's own, and tokenizer.json files of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai.data import load_tokenizer
from libai.utils.atomic import read_json
from libai.utils.errors import UserError


@dataclass(frozen=True)
class TextCodec:
    """A pair of functions that convert between text and token ids.

    `encode(text) -> token ids` includes the special tokens that the tokenizer adds. `decode(ids) ->
    text` omits them. `stop_token` ends a text. It can be a list of tokens, each of which ends a
    text, or None if unknown.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    stop_token: int | list[int] | None

    @classmethod
    def of_data(cls, tokenizer: Any) -> TextCodec:
        """Return the codec for the tokenizer of a run's token files."""
        return cls(tokenizer.encode, tokenizer.decode, tokenizer.end_of_document)

    @classmethod
    def read(cls, path: Path) -> TextCodec:
        """Read a tokenizer.json, or a folder with one.

        The stop token is read from the config.json next to it.
        """
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            if read_json(file).get("type") == "bytes":
                return cls.of_data(load_tokenizer(folder))
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower type
            raise UserError(
                f"{file} cannot be read as a tokenizer ({error}). Give a tokenizer.json."
            ) from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        end = tokenizer.token_to_id("<|endofdocument|>")
        return cls(
            lambda text: tokenizer.encode(text).ids,
            lambda ids: tokenizer.decode(list(ids)),
            _stop_token(folder) if end is None else end,
        )


class TextStream:
    """Converts tokens to text one by one: `add(token)` returns the new text.

    A character that consists of several tokens is returned after its last token.
    """

    def __init__(self, codec: TextCodec):
        self._codec = codec
        self._tokens: list[int] = []
        self._length = 0

    def add(self, token: int) -> str:
        """Return the text that `token` completes."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._take(text)

    def end(self) -> str:
        """Return the rest of the text, an incomplete character."""
        return self._take(self._codec.decode(self._tokens))

    def _take(self, text: str) -> str:
        new, self._length = text[self._length :], len(text)
        return new


def _stop_token(folder: Path) -> int | list[int] | None:
    for name in ("generation_config.json", "config.json"):
        token = read_json(folder / name).get("eos_token_id")
        if token is not None:
            return token
    return None
