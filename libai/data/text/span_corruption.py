"""T5's task: restore spans that are missing in a text (Raffel et al. 2020, section 3.1.4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from libai.data.loading.datasets import BatchDataset, read_rows
from libai.data.loading.errors import DataError
from libai.data.loading.sampling import SampleRandom


class SpanCorruption(BatchDataset):
    """A token dataset of which spans are missing: a sentinel stands for each in `input_ids`, and `labels` are the
    sentinels, each followed by its span. Both end with `end_token`.

    In training the spans are new in every epoch, a function of the visit that a resumed run repeats. In evaluation they
    are a function of (seed, sample index). How many there are and how long they are together follows from the length of
    the samples: all inputs, and all labels, have one length and need no padding.

    Args:
        dataset: gives `{"input_ids": (length,) int64}` per index; with `get_batch` it is read in batches.
        last_sentinel: the ids `last_sentinel`, `last_sentinel - 1`, … stand for the first span, the second, …; in T5's
            vocabularies it is the last id.
        first_sentinel: smallest id of a sentinel; tokens of the text have smaller ids.
        noise_share: share of the tokens that are missing.
        mean_span: mean length of a span.
    """

    def __init__(
        self,
        dataset: Any,
        last_sentinel: int,
        first_sentinel: int,
        end_token: int,
        noise_share: float = 0.15,
        mean_span: float = 3.0,
        seed: int = 0,
    ):
        if not 0.0 < noise_share < 1.0 or mean_span < 1.0:
            raise DataError(
                f"noise_share={noise_share}, mean_span={mean_span}: the first is a share between 0 and 1, such as "
                "0.15, the second a length of at least 1."
            )
        self.dataset = dataset
        self.last_sentinel, self.first_sentinel = last_sentinel, first_sentinel
        self.end_token, self.seed = end_token, seed
        length = len(dataset[0]["input_ids"])
        self.num_missing = int(np.clip(round(length * noise_share), 1, length - 1))
        self.num_spans = int(np.clip(round(self.num_missing / mean_span), 1, length - self.num_missing))
        if self.num_spans > last_sentinel - first_sentinel + 1:
            raise DataError(
                f"samples of {length} tokens lose {self.num_spans} spans, and there are "
                f"{max(last_sentinel - first_sentinel + 1, 0)} sentinels ({first_sentinel} to {last_sentinel}). "
                "Enlarge the vocabulary, or take shorter samples."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """`indices` (batch,) to `input_ids` and `labels`, (batch, …) int64."""
        return self._corrupt(
            read_rows(self.dataset, indices)["input_ids"], SampleRandom(self.seed, np.asarray(indices))
        )

    def augment_batch(self, batch: dict[str, np.ndarray], random: SampleRandom) -> dict[str, np.ndarray]:
        """The same texts with the spans of this visit."""
        return self._corrupt(self._texts(batch["input_ids"][:, :-1], batch["labels"][:, :-1]), random)

    def _texts(self, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Put the spans of `labels` where their sentinels are in `inputs`; neither has the end token any more."""
        rows = len(inputs)
        both = np.concatenate([inputs, labels], axis=1)
        is_sentinel = both >= self.first_sentinel
        places = np.nonzero(is_sentinel[:, : inputs.shape[1]])[1].reshape(rows, self.num_spans)
        spans = is_sentinel[:, inputs.shape[1] :].cumsum(axis=1) - 1
        order = np.concatenate(
            [np.tile(np.arange(inputs.shape[1]), (rows, 1)), np.take_along_axis(places, spans, axis=1)], axis=1
        ).argsort(axis=1, kind="stable")
        both, is_sentinel = (np.take_along_axis(array, order, axis=1) for array in (both, is_sentinel))
        return both[~is_sentinel].reshape(rows, -1)

    def _corrupt(self, tokens: np.ndarray, random: SampleRandom) -> dict[str, np.ndarray]:
        rows, length = tokens.shape
        draws = random.uniform(length - 2)
        kept = self._lengths(length - self.num_missing, draws[:, self.num_missing - 1 :])
        missing = self._lengths(self.num_missing, draws[:, : self.num_missing - 1])
        ends = np.stack([kept, missing], axis=2).reshape(rows, -1).cumsum(axis=1)  # kept and missing spans alternate
        segment = (np.arange(length)[None, :, None] >= ends[:, None, :]).sum(axis=2)
        is_missing = segment % 2 == 1
        is_first = is_missing & np.pad(~is_missing, ((0, 0), (1, 0)), constant_values=True)[:, :-1]
        sentinels = self.last_sentinel - segment // 2
        both = np.stack([sentinels, tokens], axis=2)
        end = np.full((rows, 1), self.end_token)

        def chosen(of_sentinels: np.ndarray, of_tokens: np.ndarray) -> np.ndarray:
            found = both[np.stack([of_sentinels, of_tokens], axis=2)].reshape(rows, -1)
            return np.concatenate([found, end], axis=1).astype(np.int64)

        return {"input_ids": chosen(is_first, ~is_missing), "labels": chosen(is_first, is_missing)}

    def _lengths(self, total: int, draws: np.ndarray) -> np.ndarray:
        """(rows, num_spans) lengths of at least 1 with this sum; `draws` (rows, total - 1) choose the cuts."""
        cuts = np.sort(np.argsort(draws, axis=1)[:, : self.num_spans - 1] + 1, axis=1)
        return np.diff(np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, total))), axis=1)
