"""Windows of memory-mapped tokens as samples for a language model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from libai.data.errors import DataError
from libai.data.token_files import open_tokens, read_index
from libai.data.tokenizers import Tokenizer, load_tokenizer


class TokenDataset:
    """Sample i is a window of `sequence_length + 1` tokens, cut into `input_ids` and the `labels` one token further.

    `path`: a folder made by `prepare_tokens`. By default each window begins where the last one's input ended
    (`stride = sequence_length`), so that no token is predicted twice; a smaller `stride` gives overlapping windows.
    Windows cross document borders, which the end-of-document token marks. A tail shorter than a window is left out.
    Raises `DataError` when the path, the split or the number of tokens does not allow a single window.
    """

    def __init__(
        self, path: str | os.PathLike, sequence_length: int, split: str = "train", *, stride: int | None = None
    ):
        stride = sequence_length if stride is None else stride
        if sequence_length < 1 or stride < 1:
            raise DataError(f"sequence_length={sequence_length} and stride={stride} must both be at least 1.")
        self.path = Path(path).expanduser()
        self.index = read_index(self.path)
        self.split = split
        self.sequence_length = sequence_length
        self.stride = stride
        self.tokens = open_tokens(self.path, split, self.index)
        if len(self.tokens) <= sequence_length:
            raise DataError(
                f"sequence_length={sequence_length} needs windows of {sequence_length + 1} tokens, but the {split} "
                f"split of {self.path} has {len(self.tokens)} tokens: use a smaller sequence_length or more text."
            )
        # A view, (all windows, sequence_length + 1): gathering rows of it copies whole windows, about 3x as fast as
        # gathering tokens by a 2-D index (measured, 8 x 1024 uint16 tokens).
        self._windows = np.lib.stride_tricks.sliding_window_view(self.tokens, sequence_length + 1)[::stride]

    @property
    def vocab_size(self) -> int:
        """Number of token ids; a model needs at least so many embeddings (OneFlow 0.9 does not check ids)."""
        return self.index.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, read from the folder."""
        return load_tokenizer(self.path)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return _as_sample(self._windows[index])

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The windows at `indices`: `input_ids` and `labels`, int64 `(len(indices), sequence_length)`."""
        return _as_sample(self._windows[indices])


def _as_sample(windows: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": windows[..., :-1].astype(np.int64), "labels": windows[..., 1:].astype(np.int64)}
