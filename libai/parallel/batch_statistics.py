"""Combine the running statistics of batch normalization in a job with several ranks
(docs/dev/decisions/0003).

In both modes each rank normalizes with the statistics of its own micro-batches and keeps running
statistics of them. Moving averages are linear, so averaging them over ranks at any time equals a
moving average of the mean statistics. Nothing has to be communicated during training. The
statistics are averaged over ranks before the weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.nn.modules.batchnorm import _BatchNorm

from libai.layers import is_batch_norm_of_rank
from libai.utils.distributed import all_reduce, get_world_size
from libai.utils.errors import UserError
from libai.utils.tensors import part_here


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `model` that keep running statistics of this rank's batches."""
    return [m for m in model.modules() if is_batch_norm_of_rank(m) and m.running_mean is not None]


def share_batch_statistics(layers: Sequence[nn.Module]) -> None:
    """Replace the running means and variances of `layers` with their mean over the ranks that hold
    them.

    Collective.

    Only the ranks of a pipeline stage hold its statistics. Tensor-parallel peers hold equal
    statistics.
    """
    if not layers or get_world_size() == 1:
        return
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)]
    mine = [part_here(buffer) for buffer in buffers]
    # all ranks must send the same number of elements, so a rank sends zeros for statistics that it
    # does not hold
    values = [
        np.zeros(buffer.shape) if part is None else part.numpy()
        for buffer, part in zip(buffers, mine)
    ]
    sums = all_reduce(np.concatenate(values).astype(np.float64))
    ends = np.cumsum([len(value) for value in values])[:-1]
    for buffer, part, total in zip(buffers, mine, np.split(sums, ends)):
        if part is not None:
            num_holders = np.size(buffer.placement.ranks) if buffer.is_global else get_world_size()
            mean = (total / num_holders).astype(np.float32)
            part.copy_(flow.tensor(mean, dtype=part.dtype, device=part.device))


def count_batches(layers: Sequence[nn.Module], number: int) -> None:
    """Add `number` to the batch count of each layer in training mode.

    This is necessary because a compiled step updates the running statistics, but not their batch
    count.
    """
    for layer in layers:
        is_counting = layer.training and layer.track_running_stats
        counts = is_counting and layer.num_batches_tracked is not None
        part = part_here(layer.num_batches_tracked) if counts else None
        if part is not None:
            part.add_(number)


def refuse_split_statistics(model: nn.Module) -> None:
    """Raise `UserError` if running statistics are split, because OneFlow 0.9 would only update a
    gathered copy.
    """
    for name, layer in model.named_modules():
        buffer = getattr(layer, "running_mean", None) if isinstance(layer, _BatchNorm) else None
        if (
            buffer is not None
            and buffer.is_global
            and any(sbp != flow.sbp.broadcast for sbp in buffer.sbp)
        ):
            raise UserError(
                f"the plan splits {name}.running_mean over tensor-parallel ranks. Batch "
                "normalization needs its full statistics on every rank of a stage, because "
                f"OneFlow 0.9 would update a copy and lose it. Remove {name}.* from the plan's "
                "`split`."
            )
