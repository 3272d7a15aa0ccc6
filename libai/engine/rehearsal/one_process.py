"""Make the updates of a multi-rank job as one process would, with the samples of all data-parallel
ranks.

Every rank makes the same updates with local tensors, so only the batches are communicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.data import TrainLoader
from libai.engine.parts import Parts
from libai.engine.rehearsal.comparison import array_of
from libai.engine.trainer import ModelTrainer
from libai.forward.state import Facts
from libai.layers import is_batch_norm_of_rank
from libai.patches.wrapping import unwrap_forward, wrap_forward
from libai.utils.distributed import any_rank, gather_arrays, gather_objects
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.sizes import available_bytes

Batches = list[list[dict[str, Any]]]
_RAGGED = (
    "the first updates are not compared with one process: the batches of the ranks differ in "
    "shape, and the loader cannot read the same samples as one batch. If a loss averages over "
    "items other than samples, such as tokens, define num_loss_items "
    "(docs/model_and_data.md#average-over-tokens)."
)
#: copies of the weights in memory: weights, gradients, two Adam states, and saved copies of weights
#: and Adam states
_COPIES = 7


def _whole_batches(trainer: ModelTrainer, iterations: Sequence[Sequence[Any]]) -> Batches | None:
    """Return the micro-batches of `iterations` with the samples of all data ranks. Collective.

    With `batch_scope=rank` the batches of the ranks stay separate and follow each other. Returns
    None on one process, if the model is compiled into a graph with global tensors, and with a
    warning if the whole model does not fit into the memory of a rank or the batches cannot be
    joined.
    """
    mesh = trainer.mesh
    if mesh.is_single or (trainer.layout.is_global and trainer.graph is not None):
        return None
    if not all(gather_objects(_fits_on_a_rank(trainer))):
        logger.warning(
            "the first updates are not compared with one process: the whole model, with its "
            "gradients and optimizer state, does not fit into the memory of each rank."
        )
        return None
    named = []
    for micro_batches in iterations:
        named += [_arrays_of(trainer, batch) for batch in micro_batches]
    shapes = gather_objects(
        [{name: array.shape for name, array in batch.items()} for batch in named]
    )
    # rank numbers run over tensor peers first, then over data peers, then over pipeline peers
    data_ranks = slice(0, mesh.data * mesh.tensor, mesh.tensor)
    stays_apart = trainer.options.batch_scope == "rank"
    # rank-local batch norms cut a batch into equal parts again
    first_axis = 0 if any(map(is_batch_norm_of_rank, trainer.model.modules())) else 1
    whole: list[dict[str, Any]] = []
    for number, batch in enumerate(named):
        of_ranks = {
            name: _gather_padded(array, [shape[number][name] for shape in shapes])[data_ranks]
            for name, array in batch.items()
        }
        if stays_apart:
            whole += [
                {name: arrays[rank] for name, arrays in of_ranks.items()}
                for rank in range(mesh.data)
            ]
        elif all(
            len({one.shape[first_axis:] for one in arrays}) == 1 for arrays in of_ranks.values()
        ):
            whole.append(
                {
                    name: np.concatenate(one) if one[0].ndim else one[0]
                    for name, one in of_ranks.items()
                }
            )
        else:
            whole.append({})
    if not all(whole):
        whole = _read_whole(trainer, named)
    if not whole:
        warn_once(logger, f"ragged {type(trainer.feed.loader).__name__}", _RAGGED)
        return None
    steps = len(whole) // len(iterations)
    return [whole[start : start + steps] for start in range(0, len(whole), steps)]


def _arrays_of(trainer: ModelTrainer, batch: Any) -> dict[str, np.ndarray]:
    inputs = trainer.parts.inputs.name_inputs(batch)
    return {name: array_of(value) for name, value in inputs.items()}


def _gather_padded(array: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the arrays of all ranks, which have these `shapes`. Collective."""
    if all(tuple(shape) == array.shape for shape in shapes):
        return gather_arrays(array)
    padded = np.zeros(np.max(shapes, axis=0), array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return [one[tuple(map(slice, shape))] for one, shape in zip(gather_arrays(padded), shapes)]


def _read_whole(trainer: ModelTrainer, named: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the micro-batches `named` of this rank as one process would collate them, with the
    samples of all ranks.

    Returns an empty list if the loader cannot read them again. Collective.
    """
    loader = trainer.feed.loader
    whole = []
    if isinstance(loader, TrainLoader):
        whole = [_arrays_of(trainer, one) for one in islice(loader.of_all_ranks(), len(named))]
    is_same = all(
        _has_rows(other[name], array, trainer.mesh.data_rank)
        for batch, other in zip(named, whole)
        for name, array in batch.items()
    )
    return [] if any_rank(not is_same) else whole


def _has_rows(whole: np.ndarray, own: np.ndarray, rank: int) -> bool:
    """Return whether `whole` has the rows `own` of a rank, except for padding."""
    rows = whole[rank * len(own) :][: len(own)]
    common = tuple(map(slice, np.minimum(rows.shape, own.shape)))
    return np.array_equal(rows[common], own[common])


def _fits_on_a_rank(trainer: ModelTrainer) -> bool:
    """Return whether a rank has enough memory for the whole model.

    This is checked only if ranks hold parts of it, on CPU, on a machine that reports its free
    memory. Otherwise the result is True.
    """
    mesh = trainer.mesh
    available = available_bytes()
    if not trainer.layout.cuts_parameters or mesh.device != "cpu" or available is None:
        return True
    weights = sum(
        parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters()
    )
    local_ranks = max(1, mesh.size // flow.env.get_node_size())
    return _COPIES * weights * local_ranks <= available


@contextmanager
def by_one_process(
    trainer: ModelTrainer, iterations: Sequence[Sequence[Any]], facts: Facts
) -> Iterator[tuple[Parts, Sequence[Sequence[Any]], bool]]:
    """Yield parts with local tensors, the micro-batches of all ranks, and True: updates with them
    are those of one process.

    If that is not possible, yield the trainer's parts, the micro-batches of this rank, and False.
    In both cases `facts` are the side effects of forward that the updates prepare for. Afterwards
    the model and the optimizer have their previous tensors again. Rank-local batch norms take their
    statistics from the samples of one rank after another (docs/dev/decisions/0003). Collective.
    """
    whole = _whole_batches(trainer, iterations)
    if whole is None:
        yield replace(trainer.parts, facts=facts), iterations, False
        return
    ranks = trainer.mesh.data
    stays_apart = trainer.options.batch_scope == "rank"
    modules = () if stays_apart else trainer.model.modules()
    norms = list(filter(is_batch_norm_of_rank, modules))
    with trainer.parts.alone(facts, interleaved=ranks if stays_apart else 1) as parts:
        for module in norms:
            wrap_forward(module, functools.partial(_rank_by_rank, ranks))
        try:
            yield parts, whole, True
        finally:
            for module in norms:
                unwrap_forward(module)


def _rank_by_rank(
    ranks: int,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    if not module.training:
        return forward(module, *args, **kwargs)
    return flow.cat([forward(module, part) for part in args[0].chunk(ranks, 0)], 0)
