"""A decoder that computes the scores of the next token for growing token sequences.

It computes eagerly, also in graph mode: each step has other shapes, and a compiled step for a fixed
length rarely paid for its compilation. libai/inference/native_decoder.py is the fast one.

Rows are padded on the left, so all rows end at the same position. Attention masks and positions
follow from the padding. They are computed with NumPy, because each step needs only a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oneflow as flow

from libai.parallel import Layout, full_tensor

HIDDEN = np.float32(-1e9)


class KeyValues:
    """Key-value cache of one layer, initially empty.

    `tensors`: the keys and values of all tokens so far, (batch, heads, length, head size).
    """

    def __init__(self) -> None:
        self.tensors: tuple[flow.Tensor, ...] = ()

    def append(self, k: flow.Tensor, v: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        """Append keys and values of new tokens, and return the keys and values of all tokens."""
        if self.tensors:
            k = flow.cat((self.tensors[0], k), dim=2)
            v = flow.cat((self.tensors[1], v), dim=2)
        self.tensors = k, v
        return k, v


class Decoder:
    """Computes the scores of the next token for rows of tokens, (batch, vocabulary) float32.

    `start(tokens, is_token, capacity)` begins the rows; both arrays are (batch, length).
    `append(tokens)`, (batch,), adds one token to each row. `select(rows)` replaces the rows by
    copies of existing rows, for beam search. Only new tokens are computed; the keys and values of
    earlier tokens are cached.

    A model with an encoder needs `encode(tokens, is_token)` first. The rows then attend to the
    encoded texts. `select` does not exchange these texts, so a row may only be replaced by a row
    with the same text.
    """

    def __init__(self, model: Any, layout: Layout):
        self.model = model
        self._layout = layout
        self._context: list[np.ndarray] = []
        self._is_token = np.zeros((0, 0), bool)
        self._caches: list[KeyValues] = []

    def encode(self, tokens: np.ndarray, is_token: np.ndarray) -> None:
        """Encode the text of every row. Both arguments are (batch, length)."""
        with flow.no_grad():
            self._context = self._run(self.model.keys_values, tokens, is_token.astype(np.int64))

    def start(self, tokens: np.ndarray, is_token: np.ndarray, capacity: int) -> np.ndarray:
        """Process the prompts and return the scores of the next tokens.

        `capacity`: maximum length of a row.
        """
        self._is_token = is_token
        # only some blocks of a model with an encoder are the decoder's
        num_layers = getattr(self.model, "num_decoder_layers", len(self.model.blocks))
        self._caches = [KeyValues() for _ in range(num_layers)]
        return self._compute(tokens, self._positions(), self._mask())

    def append(self, tokens: np.ndarray) -> np.ndarray:
        """Add `tokens` (batch,) to the rows and return the scores of the next tokens."""
        self._add_column()
        return self._compute(tokens[:, None], self._positions()[:, -1:], self._mask()[:, :, -1:])

    def select(self, rows: np.ndarray) -> None:
        """Continue from `rows` (batch,), the numbers of existing rows."""
        self._is_token = self._is_token[rows]
        index = self._layout.replicate(flow.from_numpy(rows), stage=0)
        for cache in self._caches:
            cache.tensors = tuple(flow.index_select(tensor, 0, index) for tensor in cache.tensors)

    def _add_column(self) -> None:
        self._is_token = np.pad(self._is_token, ((0, 0), (0, 1)), constant_values=True)

    def _compute(self, *arrays: np.ndarray) -> np.ndarray:
        return self._run(self._scores, *arrays, *self._context)[0]

    def _scores(
        self, tokens: flow.Tensor, positions: flow.Tensor, mask: flow.Tensor, *context: flow.Tensor
    ) -> flow.Tensor:
        with flow.no_grad():
            features = self.model.features(tokens, positions, mask, self._caches, *context)
            return self.model.logits(features[:, -1])

    def _run(self, compute: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
        """Call `compute` with arrays that are equal on all ranks, and return its outputs as arrays
        on all ranks.
        """
        with self._layout.source_ops():
            outputs = compute(
                *(self._layout.replicate(flow.from_numpy(array), stage=0) for array in arrays)
            )
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [(full_tensor(output) if output.is_global else output).numpy() for output in outputs]

    def _positions(self) -> np.ndarray:
        return np.maximum(self._is_token.cumsum(axis=1) - 1, 0)

    def _mask(self) -> np.ndarray:
        """Return the additive attention mask of all tokens, (batch, 1, length, length)."""
        length = self._is_token.shape[1]
        is_hidden = ~self._is_token[:, None, None, :] | np.triu(np.ones((length, length), bool), 1)
        return is_hidden.astype(np.float32) * HIDDEN
