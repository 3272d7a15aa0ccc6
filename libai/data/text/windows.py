"""Windows of a long row of tokens as samples of a causal language model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.loading.errors import DataError
from libai.data.text.token_files import open_offsets, open_tokens, read_index
from libai.data.text.tokenizers import Tokenizer, load_tokenizer


class TokenWindows:
    """Sample i is a window of `sequence_length + 1` tokens, cut into `input_ids` and the `labels` one token further.

    By default each window begins where the last one's input ended (`stride = sequence_length`), so that no token is
    predicted twice; a smaller `stride` gives overlapping windows. Windows cross document borders, which the
    end-of-document token marks. A tail shorter than a window is left out.

    Args:
        tokens: ids, `(num_tokens,)`, memory-mapped or not. offsets: where documents begin in it, and its end.
        name: where they come from, for messages.

    Raises `DataError` when the tokens do not allow a single window.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, sequence_length: int, stride: int | None, name: str):
        self.stride = sequence_length if stride is None else stride
        if sequence_length < 1 or self.stride < 1:
            raise DataError(f"sequence_length={sequence_length} and stride={self.stride} must both be at least 1.")
        if len(tokens) <= sequence_length:
            raise DataError(
                f"sequence_length={sequence_length} needs windows of {sequence_length + 1} tokens, but {name} has "
                f"{len(tokens)} tokens: use a smaller sequence_length or more text."
            )
        self.tokens, self.offsets, self.sequence_length = tokens, offsets, sequence_length
        # A view, (all windows, sequence_length + 1): gathering rows of it copies whole windows, about 3x as fast as
        # gathering tokens by a 2-D index (measured, 8 x 1024 uint16 tokens).
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)[:: self.stride]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return _as_sample(self._windows[index])

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The windows at `indices`: `input_ids` and `labels`, int64 `(len(indices), sequence_length)`."""
        return _as_sample(self._windows[indices])


class TokenDataset(TokenWindows):
    """The windows of one split of a folder made by `prepare_tokens` or `libai preprocess`, see `TokenWindows`."""

    def __init__(
        self, path: str | os.PathLike, sequence_length: int, split: str = "train", *, stride: int | None = None
    ):
        self.path, self.split = Path(path).expanduser(), split
        self.index = read_index(self.path)
        tokens = open_tokens(self.path, split, self.index)
        offsets = open_offsets(self.path, split, self.index)
        super().__init__(tokens, offsets, sequence_length, stride, f"the {split} split of {self.path}")

    def __reduce__(self) -> Any:
        """A copy in another process maps the file again; the tokens are not sent."""
        return partial(TokenDataset, stride=self.stride), (self.path, self.sequence_length, self.split)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; a model needs at least so many embeddings (OneFlow 0.9 does not check ids)."""
        return self.index.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, read from the folder."""
        return load_tokenizer(self.path, self.index.end_of_document)


def _as_sample(windows: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": windows[..., :-1].astype(np.int64), "labels": windows[..., 1:].astype(np.int64)}
