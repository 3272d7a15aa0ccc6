"""Samples of different lengths: padded into a batch, packed into rows of one length, visited by similar length."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libai.data.loading.errors import DataError

#: groups in which samples are sorted by length: large enough to find similar ones, small enough to stay random
_GROUPS_PER_WINDOW = 50


def lengths_of(dataset: Any) -> np.ndarray:
    """`dataset.lengths`, the length of every sample, as an array. Raises `DataError` when there is none."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is None or len(lengths) != len(dataset):
        found = "has no such attribute" if lengths is None else f"has {len(lengths)} for {len(dataset)} samples"
        raise DataError(f"{type(dataset).__name__}.lengths must hold the length of every sample; it {found}. Add it.")
    return np.asarray(lengths)


def group_similar(order: np.ndarray, lengths: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
    """`order`, a permutation, changed so that each `group` consecutive samples have similar lengths.

    Samples are sorted within windows of 50 groups, and the groups of a window shuffled.
    """
    window, parts = group * _GROUPS_PER_WINDOW, []
    for start in range(0, len(order), window):
        piece = order[start : start + window]
        piece = piece[np.argsort(lengths[piece], kind="stable")]
        num_full = len(piece) // group
        full = piece[: num_full * group].reshape(num_full, group)
        parts += [full[random.permutation(num_full)].reshape(-1), piece[num_full * group :]]
    return np.concatenate(parts)


class PadCollate:
    """A collate function that pads arrays along their first axis to the longest of the batch.

    Args:
        padding: key -> value to fill with, such as `{"input_ids": 0, "labels": -100}`. Other keys must have one shape.
        multiple_of: lengths are rounded up to it; few different shapes suit graph mode, which compiles one of them.
        max_length: longer samples are cut.
        mask: name of a further bool array that is true where a sample has a value.

    >>> pad = PadCollate({"x": 0}, multiple_of=4)
    >>> pad([{"x": [1, 2]}, {"x": [3]}])["x"].tolist()
    [[1, 2, 0, 0], [3, 0, 0, 0]]
    """

    def __init__(
        self,
        padding: Mapping[str, float],
        *,
        multiple_of: int = 1,
        max_length: int | None = None,
        mask: str | None = None,
    ):
        if not padding or multiple_of < 1 or (max_length is not None and max_length < 1):
            raise DataError(
                f"PadCollate(padding={dict(padding)}, multiple_of={multiple_of}, max_length={max_length}): name at "
                "least one key to pad, and lengths of at least 1."
            )
        self._padding, self._multiple_of = dict(padding), multiple_of
        self._max_length, self._mask = max_length, mask

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """The batch of `samples`."""
        self._check(samples)
        return self.pad_to(samples, max(len(sample[key]) for sample in samples for key in self._padding))

    def pad_to(self, samples: Sequence[Mapping[str, Any]], length: int) -> dict[str, np.ndarray]:
        """The batch of `samples`, as long as a sample of `length` needs it."""
        self._check(samples)
        length = -(-length // self._multiple_of) * self._multiple_of
        length = min(length, self._max_length or length)
        batch = {key: self._padded(samples, key, length) for key in self._padding}
        for key in samples[0].keys() - batch.keys():
            try:
                batch[key] = np.stack([np.asarray(sample[key]) for sample in samples])
            except ValueError as error:
                raise DataError(f"{key!r} differs in shape ({error}): name a value to pad it with.") from None
        if self._mask is not None:
            first = next(iter(self._padding))
            ends = np.array([min(len(sample[first]), length) for sample in samples])
            batch[self._mask] = np.arange(length) < ends[:, None]
        return batch

    def _padded(self, samples: Sequence[Mapping[str, Any]], key: str, length: int) -> np.ndarray:
        arrays = [np.asarray(sample[key])[:length] for sample in samples]
        padded = np.full((len(arrays), length, *arrays[0].shape[1:]), self._padding[key], arrays[0].dtype)
        for row, array in zip(padded, arrays):
            row[: len(array)] = array
        return padded

    def _check(self, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples:
            missing = [key for key in self._padding if not isinstance(sample, Mapping) or key not in sample]
            if missing:
                found = sorted(sample) if isinstance(sample, Mapping) else f"is a {type(sample).__name__}"
                raise DataError(f"PadCollate pads {missing[0]!r}, and a sample has {found}. Name one of its keys.")


class PackedDataset:
    """Samples of `dataset`, packed whole into rows of `sequence_length`, as few rows as best fit finds.

    Args:
        dataset: its samples are dicts of arrays of one length each, such as `input_ids` and `labels`; with an attribute
            `lengths` it is not read to know them.
        padding: key -> value for what stays free at the end of a row; these keys make up the rows.
        segments: name of a further array with 1, 2, … for the samples of a row and 0 for padding, for models that must
            not look from one sample into another.
        positions: name of a further array that counts from 0 in each sample.
    """

    def __init__(
        self,
        dataset: Any,
        sequence_length: int,
        padding: Mapping[str, float],
        *,
        segments: str | None = None,
        positions: str | None = None,
    ):
        self.dataset, self.sequence_length = dataset, sequence_length
        self._padding, self._segments, self._positions = dict(padding), segments, positions
        if hasattr(dataset, "lengths"):
            lengths = lengths_of(dataset)
        else:
            key = next(iter(padding))
            lengths = np.array([len(dataset[index][key]) for index in range(len(dataset))])
        longest = int(lengths.argmax())
        if lengths[longest] > sequence_length:
            raise DataError(
                f"sample {longest} of {type(dataset).__name__} has the length {lengths[longest]}, and rows have "
                f"sequence_length={sequence_length}. Cut it in the dataset, or choose longer rows."
            )
        self.rows = _best_fit(lengths, sequence_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        samples = [self.dataset[member] for member in self.rows[index]]
        ends = np.cumsum([len(sample[next(iter(self._padding))]) for sample in samples])
        row = {key: self._joined([np.asarray(s[key]) for s in samples], value) for key, value in self._padding.items()}
        if self._segments is not None:
            row[self._segments] = self._joined([np.searchsorted(ends, np.arange(ends[-1]), side="right") + 1], 0)
        if self._positions is not None:
            row[self._positions] = self._joined([np.arange(end) for end in np.diff(ends, prepend=0)], 0)
        return row

    def _joined(self, arrays: list[np.ndarray], value: float) -> np.ndarray:
        row = np.full((self.sequence_length, *arrays[0].shape[1:]), value, arrays[0].dtype)
        joined = np.concatenate(arrays)
        row[: len(joined)] = joined
        return row


def _best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Which samples make up each row: the longest first, each into the row that it fills most."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (space, row), sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect.bisect_left(free, (length, -1))
        if place == len(free):
            rows.append([index])
            space, row = capacity - length, len(rows) - 1
        else:
            space, row = free.pop(place)
            rows[row].append(index)
            space -= length
        if space:
            bisect.insort(free, (space, row))
    return sorted(sorted(row) for row in rows)
