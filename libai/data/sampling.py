"""The order in which the ranks read the samples of a dataset, and the random numbers for each
sample.

Everything here is a pure function of (seed, position in the endless stream). Resuming a run needs
no saved state, and the order does not depend on the number of ranks, the micro-batch size or
gradient accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libai.data.errors import DataError
from libai.utils.seeding import GOLDEN, mix_bits
from libai.utils.sizes import check_range, check_sizes


class SampleStream:
    """The endless sequence of sample indices: one permutation of `range(num_samples)` per epoch,
    concatenated.

    With `shuffle=False` every epoch visits the samples in order. The permutation of an epoch
    depends only on (seed, epoch). It takes 8 bytes of memory per sample.
    """

    def __init__(self, num_samples: int, *, seed: int = 0, shuffle: bool = True):
        if num_samples < 1:
            raise DataError("the dataset is empty (len 0): check its path and split.")
        check_range("0 <= x < inf", DataError, seed=seed)
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        # One tuple, replaced as a whole: a reading thread that is being shut down may still read
        # the old one.
        self._cached: tuple[int, np.ndarray] | None = None

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the sample indices at the stream positions `start <= p < stop`, int64 `(stop -
        start,)`.
        """
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.num_samples)
            end = min(self.num_samples, offset + stop - start)
            pieces.append(self._order(epoch)[offset:end])
            start += end - offset
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the permutation of one epoch, int64 `(num_samples,)`. The latest one is cached."""
        if self._cached is not None and self._cached[0] == epoch:
            return self._cached[1]
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        else:
            order = self._cached[1] if self._cached is not None else np.arange(self.num_samples)
        self._cached = (epoch, order)
        return order


@dataclass(frozen=True)
class SampleRandom:
    """Uniform random numbers for the samples of one micro-batch.

    The numbers of a sample depend on (seed, its position in the stream). So augmentation differs
    between epochs, is repeated exactly by a resumed run, and does not depend on the number of ranks
    or the micro-batch size.
    """

    seed: int
    positions: np.ndarray

    def uniform(self, num_draws: int) -> np.ndarray:
        """Return `num_draws` numbers in [0, 1) per sample, float64 `(samples, num_draws)`.

        Repeated calls return the same numbers.
        """
        state = mix_bits(
            self.positions.astype(np.uint64) + mix_bits(np.array([self.seed], np.uint64))
        )
        counters = GOLDEN * np.arange(1, num_draws + 1, dtype=np.uint64)
        bits = mix_bits(state[:, None] + counters)
        return (bits >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class DataLayout:
    """This rank's share of every step: `micro_batch_size` samples for rank `data_rank` of
    `num_data_ranks`.
    """

    micro_batch_size: int
    data_rank: int = 0
    num_data_ranks: int = 1

    def __post_init__(self) -> None:
        check_sizes(DataError, micro_batch_size=self.micro_batch_size)
        check_range(f"0 <= x < {self.num_data_ranks}", DataError, data_rank=self.data_rank)

    @property
    def samples_per_step(self) -> int:
        """Number of samples that all ranks together read in one micro-step."""
        return self.micro_batch_size * self.num_data_ranks

    def slice_of_step(self, step_start: int) -> tuple[int, int]:
        """Return this rank's `(start, stop)` within the step that begins at `step_start`."""
        start = step_start + self.data_rank * self.micro_batch_size
        return start, start + self.micro_batch_size
