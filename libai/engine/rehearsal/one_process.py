"""Updates of data-parallel ranks with local replicas, made by one process with the samples of all of them.

Every rank makes the same ones, on its own replica, so that nothing is sent but the batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import oneflow as flow

from libai.layers import is_batch_norm_of_rank
from libai.parallel import Mesh
from libai.patches.wrapping import unwrap_forward, wrap_forward
from libai.utils.distributed import gather_arrays, gather_objects

Batches = list[list[dict[str, Any]]]


def whole_batches(trainer: Any, iterations: Sequence[Sequence[Any]]) -> Batches | None:
    """Return the micro-batches of `iterations` with the samples of all data ranks. Collective.

    None where ranks hold no replicas of their own, see their own samples only as the user asks, or have batches of
    different shapes.
    """
    mesh = trainer.mesh
    if mesh.data == 1 or trainer.layout.is_global or not mesh.is_data_parallel_only:
        return None
    if trainer.options.batch_scope == "rank":
        return None
    named = []
    for micro_batches in iterations:
        for batch in micro_batches:
            named.append({name: _array(value) for name, value in trainer.gradients.name_inputs(batch).items()})
    shapes = gather_objects([{name: array.shape for name, array in batch.items()} for batch in named])
    if any(of_rank != shapes[0] for of_rank in shapes):
        return None
    joined = []
    for batch in named:
        joined.append({name: _of_all_ranks(array) for name, array in batch.items()})
    steps = len(iterations[0])
    return [joined[start : start + steps] for start in range(0, len(joined), steps)]


def _array(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, flow.Tensor) else np.asarray(value)


def _of_all_ranks(array: np.ndarray) -> np.ndarray:
    arrays = gather_arrays(array)
    return np.concatenate(arrays) if array.ndim else arrays[0]


@contextmanager
def as_one_process(trainer: Any) -> Iterator[None]:
    """In the block updates of `trainer` are those of one process: gradients are not averaged, losses are not gathered.

    Batch norms of a rank take their statistics from the samples of one rank after the other (docs/decisions/0005).
    """
    mesh, gradients = trainer.mesh, trainer.gradients
    norms = [module for module in trainer.model.modules() if is_batch_norm_of_rank(module)]
    around = functools.partial(_rank_by_rank, mesh.data)
    for module in norms:
        wrap_forward(module, around)
    trainer.mesh = gradients.mesh = Mesh(device=mesh.device)
    data_rank, gradients._data_rank = gradients._data_rank, 0
    try:
        yield
    finally:
        trainer.mesh = gradients.mesh = mesh
        gradients._data_rank = data_rank
        for module in norms:
            unwrap_forward(module)


def _rank_by_rank(ranks: int, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    if not module.training:
        return forward(module, *args, **kwargs)
    return flow.cat([forward(module, part) for part in args[0].chunk(ranks, 0)], 0)
