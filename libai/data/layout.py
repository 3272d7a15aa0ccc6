"""Which samples of a step belong to which data-parallel rank: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from libai.data.errors import DataError


@dataclass(frozen=True)
class DataLayout:
    """This rank's share of every step: `micro_batch_size` samples, as number `data_rank` of `num_data_ranks`."""

    micro_batch_size: int
    data_rank: int = 0
    num_data_ranks: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise DataError(f"micro_batch_size={self.micro_batch_size}: a micro-batch holds at least one sample.")
        if not 0 <= self.data_rank < self.num_data_ranks:
            raise DataError(
                f"data_rank={self.data_rank} is not one of the {self.num_data_ranks} data-parallel rank(s): "
                f"give 0 <= data_rank < num_data_ranks."
            )

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks together take in one micro-step."""
        return self.micro_batch_size * self.num_data_ranks

    def slice_of_step(self, step_start: int) -> tuple[int, int]:
        """This rank's `(start, stop)` within the step that begins at `step_start`."""
        start = step_start + self.data_rank * self.micro_batch_size
        return start, start + self.micro_batch_size
