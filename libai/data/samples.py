"""Datasets that build samples from tokens: BERT's masked tokens and sentence order, and T5's span
corruption.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai.data.datasets import Batch, BatchDataset, read_rows
from libai.data.errors import DataError
from libai.data.sampling import SampleRandom
from libai.utils.sizes import check_range


class _RandomlyChanged(BatchDataset):
    """Base of token datasets that change the samples of another dataset.

    In training the changes differ between epochs. They depend on the position in the sample stream,
    so a resumed run repeats them. In evaluation they depend only on (seed, sample index).
    """

    dataset: Any
    seed: int

    def __len__(self) -> int:
        return len(self.dataset)

    def get_batch(self, indices: np.ndarray) -> Batch:
        """Return the changed samples at `indices` (batch,): `input_ids` and `labels`, each (batch,
        …) int64.
        """
        rows = read_rows(self.dataset, indices)
        return self._changed(rows, SampleRandom(self.seed, np.asarray(indices)))

    def augment_batch(self, batch: Batch, random: SampleRandom) -> Batch:
        """Return the same samples with the changes for their positions in the stream."""
        return self._changed(self._restored(batch), random)

    @abstractmethod
    def _changed(self, batch: Batch, random: SampleRandom) -> Batch:
        """Change the `input_ids` (batch, length), and set the labels."""

    @abstractmethod
    def _restored(self, batch: Batch) -> Batch:
        """Undo `_changed`."""


class MaskedTokens(_RandomlyChanged):
    """A token dataset with BERT's masking (Devlin et al. 2019).

    Of the chosen positions, 80 % become the mask token, 10 % become a random token and 10 % are
    unchanged. Labels hold the original token at these positions and `ignore_index` everywhere else.

    In training the masks change in every epoch, see `_RandomlyChanged`. In evaluation they are
    always the same.

    Args:
        dataset: returns `{"input_ids": (length,) int64}` per index. It is read in batches if it has
            `get_batch`. Its `labels` are replaced, and all other keys are kept.
        mask_token: id of the mask token.
        mask_prob: fraction of positions that are chosen.
        vocab_size: random tokens are sampled from `range(vocab_size)`, or from `range(mask_token)`
            if None.
        special_tokens: ids that are never chosen.
    """

    def __init__(
        self,
        dataset: Any,
        mask_token: int,
        mask_prob: float = 0.15,
        seed: int = 0,
        ignore_index: int = -100,
        *,
        vocab_size: int | None = None,
        special_tokens: Sequence[int] = (),
    ):
        check_range("0 < x < 1", DataError, mask_prob=mask_prob)
        self.dataset = dataset
        self.mask_token = mask_token
        self.mask_prob = mask_prob
        self.seed = seed
        self.ignore_index = ignore_index
        self.vocab_size = mask_token if vocab_size is None else vocab_size
        self.special_tokens = list(special_tokens)

    def _restored(self, batch: Batch) -> Batch:
        is_masked = batch["labels"] != self.ignore_index
        return {**batch, "input_ids": np.where(is_masked, batch["labels"], batch["input_ids"])}

    def _changed(self, batch: Batch, random: SampleRandom) -> Batch:
        tokens = batch["input_ids"]
        chosen, kind, other = np.split(random.uniform(3 * tokens.shape[1]), 3, axis=1)
        is_chosen = (chosen < self.mask_prob) & ~np.isin(tokens, self.special_tokens)
        random_tokens = (other * self.vocab_size).astype(np.int64)
        replaced = np.where(
            kind < 0.8, self.mask_token, np.where(kind < 0.9, random_tokens, tokens)
        )
        return {
            **batch,
            "input_ids": np.where(is_chosen, replaced, tokens).astype(np.int64),
            "labels": np.where(is_chosen, tokens, self.ignore_index).astype(np.int64),
        }


class SentenceOrder(BatchDataset):
    """Pairs of consecutive segments of one document, swapped in half of the samples (ALBERT, Lan et
    al. 2020).

    A sample is `[cls] first [sep] second [sep]` and padding. Its keys are `input_ids`,
    `token_type_ids` (1 in the second segment), `attention_mask` and `next_sentence_labels` (1 if
    the two are swapped), the target of BERT's second head. Documents are cut into pieces of at most
    `sequence_length - 3` tokens. Pieces with fewer than 2 tokens are left out. Each piece is split
    into two segments at a random position. The position and the swap depend on (seed, sample
    index).

    Args:
        dataset: has `tokens` and the `offsets` of documents, like `TokenDataset` and
            `MegatronDataset`.
        cls_token, sep_token, pad_token: token ids.
        end_of_document: id of the token that ends each document, which is removed; None if
            documents have no such token.
    """

    def __init__(
        self,
        dataset: Any,
        sequence_length: int,
        *,
        cls_token: int,
        sep_token: int,
        pad_token: int,
        end_of_document: int | None = None,
        seed: int = 0,
    ):
        # two segments and three special tokens
        check_range("5 <= x < inf", DataError, sequence_length=sequence_length)
        self.dataset, self.sequence_length, self.seed = dataset, sequence_length, seed
        self._special = (cls_token, sep_token, pad_token)
        ends: np.ndarray = np.asarray(dataset.offsets[1:]) - (end_of_document is not None)
        self._starts, self._lengths = _pieces(
            np.asarray(dataset.offsets[:-1]), ends, sequence_length - 3
        )
        if not len(self._starts):
            raise DataError(
                "no document has the two tokens that a pair of segments needs: use longer "
                "documents."
            )

    def __len__(self) -> int:
        return len(self._starts)

    def get_batch(self, indices: np.ndarray) -> Batch:
        """Return the samples at `indices`.

        The labels have the shape `(len(indices),)`, all other arrays `(len(indices),
        sequence_length)`.
        """
        starts, lengths = self._starts[indices][:, None], self._lengths[indices][:, None]
        place, swap = SampleRandom(self.seed, np.asarray(indices)).uniform(2).T
        cut = 1 + (place[:, None] * (lengths - 1)).astype(np.int64)
        is_swapped = swap[:, None] < 0.5
        first = np.where(
            is_swapped, lengths - cut, cut
        )  # length of the first segment of the sample
        position = np.arange(self.sequence_length)
        in_first = (position >= 1) & (position <= first)
        in_second = (position >= first + 2) & (position < lengths + 2)
        offset = np.where(in_first, position - 1, position - first - 2)
        offset += np.where(is_swapped == in_first, cut, 0)  # a swapped sample begins after the cut
        cls_token, sep_token, pad_token = self._special
        special = np.where(
            position == 0, cls_token, np.where(position < lengths + 3, sep_token, pad_token)
        )
        in_text = in_first | in_second
        tokens = self.dataset.tokens[np.where(in_text, starts + offset, starts)]
        return {
            "input_ids": np.where(in_text, tokens, special).astype(np.int64),
            "token_type_ids": ((position >= first + 2) & (position < lengths + 3)).astype(np.int64),
            "attention_mask": position < lengths + 3,
            "next_sentence_labels": is_swapped[:, 0].astype(np.int64),
        }


def _pieces(starts: np.ndarray, ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and the lengths of the pieces of all documents."""
    counts = -(-(ends - starts) // longest)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    piece_starts = np.repeat(starts, counts) + (np.arange(counts.sum()) - first) * longest
    lengths = np.minimum(longest, np.repeat(ends, counts) - piece_starts)
    return piece_starts[lengths >= 2], lengths[lengths >= 2]


class SpanCorruption(_RandomlyChanged):
    """A token dataset with T5's span corruption (Raffel et al. 2020, section 3.1.4).

    Each removed span is replaced by a sentinel in `input_ids`. `labels` are the sentinels, each
    followed by its span. Both end with `end_token`.

    In training the spans change in every epoch. They depend on the position in the sample stream,
    so a resumed run repeats them. In evaluation they depend only on (seed, sample index). The
    number of spans and their total length follow from the sample length. So all inputs have the
    same length, as do all labels, and need no padding.

    Args:
        dataset: returns `{"input_ids": (length,) int64}` per index. It is read in batches if it has
            `get_batch`.
        last_sentinel: id of the sentinel of the first span; the second span has `last_sentinel -
            1`, and so on. In T5's vocabularies it is the last id.
        first_sentinel: smallest id of a sentinel. All text tokens have smaller ids.
        noise_share: fraction of tokens that are removed.
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
        check_range("0 < x < 1", DataError, noise_share=noise_share)
        check_range("1 <= x < inf", DataError, mean_span=mean_span)
        self.dataset = dataset
        self.last_sentinel, self.first_sentinel = last_sentinel, first_sentinel
        self.end_token, self.seed = end_token, seed
        length = len(dataset[0]["input_ids"])
        self.num_missing = int(np.clip(round(length * noise_share), 1, length - 1))
        self.num_spans = int(
            np.clip(round(self.num_missing / mean_span), 1, length - self.num_missing)
        )
        if self.num_spans > last_sentinel - first_sentinel + 1:
            raise DataError(
                f"samples of {length} tokens have {self.num_spans} masked spans, but there are "
                f"only {max(last_sentinel - first_sentinel + 1, 0)} sentinels ({first_sentinel} "
                f"to {last_sentinel}). Enlarge the vocabulary, or use shorter samples."
            )

    def _restored(self, batch: Batch) -> Batch:
        """Put each span of the labels in place of its sentinel in the inputs."""
        inputs = batch["input_ids"][:, :-1]
        labels = batch["labels"][:, :-1]
        rows = len(inputs)
        both = np.concatenate([inputs, labels], axis=1)
        is_sentinel = both >= self.first_sentinel
        places = np.nonzero(is_sentinel[:, : inputs.shape[1]])[1].reshape(rows, self.num_spans)
        spans = is_sentinel[:, inputs.shape[1] :].cumsum(axis=1) - 1
        order = np.concatenate(
            [
                np.tile(np.arange(inputs.shape[1]), (rows, 1)),
                np.take_along_axis(places, spans, axis=1),
            ],
            axis=1,
        ).argsort(axis=1, kind="stable")
        both, is_sentinel = (
            np.take_along_axis(array, order, axis=1) for array in (both, is_sentinel)
        )
        return {"input_ids": both[~is_sentinel].reshape(rows, -1)}

    def _changed(self, batch: Batch, random: SampleRandom) -> Batch:
        tokens = batch["input_ids"]
        rows, length = tokens.shape
        draws = random.uniform(length - 2)
        kept = self._lengths(length - self.num_missing, draws[:, self.num_missing - 1 :])
        missing = self._lengths(self.num_missing, draws[:, : self.num_missing - 1])
        ends = (
            np.stack([kept, missing], axis=2).reshape(rows, -1).cumsum(axis=1)
        )  # kept and missing spans alternate
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
        """Return span lengths (rows, num_spans), each at least 1, with the sum `total`.

        `draws` (rows, total - 1) choose the cuts.
        """
        cuts = np.sort(np.argsort(draws, axis=1)[:, : self.num_spans - 1] + 1, axis=1)
        return np.diff(np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, total))), axis=1)
