"""Conversations as training data: the loss counts what chosen roles say, and nothing else.

A line of the file is `{"messages": [{"role": "user", "content": "…"}, …]}`, with any number of
turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from docstrings import smollm2

from libai.data import BPETokenizer
from libai.utils.errors import UserError

#: the form of a message in ChatML, which SmolLM2 and Qwen2 use; other models have other marks
START, END = "<|im_start|>{role}\n", "<|im_end|>"
#: label of a token that is not counted
_IGNORED = -100


def build_chat_dataset(
    file: str, weights: str, length: int, roles: Sequence[str] = ("assistant",)
) -> dict[str, np.ndarray]:
    """Return `input_ids` and `labels`, both (rows, length) int64, for the tokenizer of SmolLM2 in
    the folder `weights`.
    """
    tokenizer = BPETokenizer.load(smollm2(weights) / "hf" / "tokenizer.json", END)
    return pack(file, tokenizer, length, roles)


def pack(file: str, tokenizer: Any, length: int, roles: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the conversations of `file` in rows of `length` tokens.

    A row holds whole conversations, one after another, and is filled up with tokens that are not
    counted. Raises `UserError` with the line of a conversation that is longer than a row.
    """
    rows: list[list[tuple[int, bool]]] = []
    for number, messages in _read(Path(file)):
        tokens = list(_tokens(messages, tokenizer, roles))
        if len(tokens) > length + 1:
            raise UserError(
                f"{file}, line {number}: the conversation has {len(tokens)} tokens, more than "
                f"length + 1 = {length + 1}. Choose a larger length, or shorten it."
            )
        if rows and len(rows[-1]) + len(tokens) <= length + 1:
            rows[-1] += tokens
        else:
            rows.append(tokens)
    ids = np.full((len(rows), length + 1), tokenizer.end_of_document)
    is_counted = np.zeros(ids.shape, bool)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], is_counted[row, : len(tokens)] = zip(*tokens)
    # the token at one place is predicted from the place before it
    labels = np.where(is_counted, ids, _IGNORED)[:, 1:]
    return {"input_ids": ids[:, :-1], "labels": labels}


def _tokens(
    messages: list[dict[str, str]], tokenizer: Any, roles: Sequence[str]
) -> Iterator[tuple[int, bool]]:
    """Yield each token of a conversation, and whether it is counted: texts of `roles` with their
    end marks.
    """
    for message in messages:
        is_counted = message["role"] in roles
        parts = [
            (START.format(role=message["role"]), False),
            (message["content"] + END, is_counted),
            ("\n", False),
        ]
        for text, counts in parts:
            yield from ((token, counts) for token in tokenizer.encode(text))


def _read(file: Path) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Yield the number and the messages of each line."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            "".join(message["role"] + message["content"] for message in messages)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'{file}, line {number}: expected {{"messages": [{{"role": "user", "content": '
                f'"…"}}, …]}}, found {line[:60]} ({error!r}).'
            ) from None
        yield number, messages
