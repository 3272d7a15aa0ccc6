"""Compute batch sizes and the number of data-parallel ranks.

All functions are pure and take integers.
"""

from __future__ import annotations

from dataclasses import dataclass

from libai.config.settings import schema
from libai.config.settings.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes with `global_ == micro * accumulation * data_parallel_size`.

    `micro` and `global_` are in samples, and `accumulation` is in micro-batches.
    """

    micro: int
    accumulation: int
    global_: int


def solve_data_parallel_size(
    world_size: int,
    data_parallel_size: int | None,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
) -> int:
    """Return the number of data-parallel replicas, which is derived if `data_parallel_size` is
    None.

    Raises `ConfigError` if the product of the three sizes is not `world_size`.

    >>> solve_data_parallel_size(8, None, 2, 1)
    4
    """
    inner = tensor_parallel_size * pipeline_parallel_size
    if data_parallel_size is None and world_size % inner == 0:
        return world_size // inner
    if data_parallel_size is None:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"train.dist.tensor_parallel_size={tensor_parallel_size} × "
            f"pipeline_parallel_size={pipeline_parallel_size} = {inner} does not divide the "
            f"{world_size} process{'es' if world_size > 1 else ''} of this run. Set their product "
            f"to {_listed(divisors)}, or start a multiple of {inner} processes."
        )
    product = data_parallel_size * inner
    if product != world_size:
        fits = world_size // inner if world_size % inner == 0 else None
        change = (
            f"Set train.dist.data_parallel_size={fits} (or null)" if fits else "Change train.dist"
        )
        raise ConfigError(
            f"train.dist asks for {data_parallel_size} data × {tensor_parallel_size} tensor × "
            f"{pipeline_parallel_size} pipeline = {product}, but the number of processes is "
            f"{world_size}. {change}, or start {product}."
        )
    return data_parallel_size


def solve_batch_sizes(
    micro: int | None, total: int | None, steps: int | None, ranks: int
) -> BatchSizes:
    """Complete the micro-batch size, the global batch size and the number of accumulation steps.

    None means unknown. Accumulation defaults to 1. `ranks` is the number of data-parallel ranks.
    Raises `ConfigError` with the nearest valid values if no solution exists.

    >>> solve_batch_sizes(4, 32, None, 2)
    BatchSizes(micro=4, accumulation=4, global_=32)
    """
    if micro is None and total is None:
        raise ConfigError(
            "No batch size is set. Set train.train_micro_batch_size (samples per rank and forward "
            "pass) or train.global_batch_size (samples per iteration)."
        )
    known = steps or 1 if micro is None else micro
    if total is None:
        return BatchSizes(known, steps or 1, known * (steps or 1) * ranks)
    unit = known * ranks
    needed = total // unit
    if total % unit:
        what = "accumulation" if micro is None else "micro-batch"
        near = [n for n in (needed * unit, needed * unit + unit) if n > 0]
        raise ConfigError(
            f"train.global_batch_size={total} is not a multiple of {what} × data-parallel ranks = "
            f"{known} × {ranks}. Nearest: {_listed(near)}."
        )
    if micro is None:
        return BatchSizes(needed, known, total)
    if steps not in (None, needed):
        asked = f"{micro} × {steps} × {ranks} = {unit * (steps or 1)}"
        raise ConfigError(
            f"train.global_batch_size={total} is not micro-batch × accumulation × data-parallel "
            f"ranks = {asked}. Set train.num_accumulation_steps={needed} or "
            f"train.global_batch_size={unit * (steps or 1)}, or leave one of them null."
        )
    return BatchSizes(micro, needed, total)


def batch_sizes_of(train: schema.Train, data_parallel_size: int) -> BatchSizes:
    """Return the result of `solve_batch_sizes` for the settings in the section `train`."""
    return solve_batch_sizes(
        train.train_micro_batch_size,
        train.global_batch_size,
        train.num_accumulation_steps,
        data_parallel_size,
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
