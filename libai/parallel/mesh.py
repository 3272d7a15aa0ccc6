"""Arrange the ranks of a job as data x tensor x pipeline, and compute the resulting placements.

A mesh only does arithmetic on rank numbers and moves no tensors. Pipeline is the slowest axis, then
data, then tensor. Tensor-parallel peers, which communicate most, are therefore neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import oneflow as flow

from libai.config.batch import solve_data_parallel_size
from libai.utils.distributed import get_rank, get_world_size


@dataclass(frozen=True)
class Mesh:
    """`data * tensor * pipeline` ranks on one device type (`"cpu"` or `"cuda"`)."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    device: str = "cpu"

    @classmethod
    def of_this_job(
        cls, device: str, data: int | None = None, tensor: int = 1, pipeline: int = 1
    ) -> Mesh:
        """Return the mesh over all ranks of this job.

        `data=None` uses all ranks left over by tensor and pipeline.

        Raises `UserError` if the product is not equal to the number of processes.
        """
        data = solve_data_parallel_size(get_world_size(), data, tensor, pipeline)
        return cls(data, tensor, pipeline, device)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline

    @property
    def data_rank(self) -> int:
        """Index of the slice of every global batch that this process reads, in `range(data)`."""
        return get_rank() // self.tensor % self.data

    @property
    def tensor_rank(self) -> int:
        """Index of this process among its tensor-parallel peers, which share weights and read the
        same data.
        """
        return get_rank() % self.tensor

    @property
    def pipeline_rank(self) -> int:
        """The pipeline stage of this process."""
        return get_rank() // (self.data * self.tensor)

    @cached_property  # trainers read it in every iteration
    def is_single(self) -> bool:
        """True for one process: tensors stay local and no collective is needed."""
        return self.size == 1

    @property
    def is_data_parallel_only(self) -> bool:
        """True if every rank holds the full model."""
        return self.tensor == 1 and self.pipeline == 1

    def placement(self) -> Any:
        """Return the OneFlow placement of all ranks, in one row."""
        return flow.placement(self.device, list(range(self.size)))

    def stage_placement(self, stage: int) -> Any:
        """Return the OneFlow placement of one stage: a data x tensor table if both are above 1,
        else one row.
        """
        count = self.data * self.tensor
        ranks = np.arange(stage * count, (stage + 1) * count)
        if self.is_table:
            ranks = ranks.reshape(self.data, self.tensor)
        return flow.placement(self.device, ranks.tolist())

    @property
    def is_table(self) -> bool:
        """True if a stage's ranks form a table.

        An sbp then has two entries, one for data and one for tensor ranks.
        """
        return self.data > 1 and self.tensor > 1

    def sbp(self, data: Any, tensor: Any) -> list[Any]:
        """Return the OneFlow sbp on a stage with `data` over its data ranks and `tensor` over its
        tensor ranks.
        """
        if self.is_table:
            return [data, tensor]
        return [tensor if self.tensor > 1 else data]

    def describe(self) -> str:
        """Return a description such as `2 processes = 2 data x 1 tensor x 1 pipeline on cpu`."""
        return (
            f"{self.size} process{'es' if self.size > 1 else ''} = {self.data} data x "
            f"{self.tensor} tensor x {self.pipeline} pipeline on {self.device}"
        )
