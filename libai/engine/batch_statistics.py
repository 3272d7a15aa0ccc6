"""Running statistics of batch normalization in a job of several ranks; docs/decisions/0005-batchnorm.md tells why so.

In both modes each rank normalizes with the statistics of its own micro-batch and keeps running statistics of those.
They are moving averages, hence linear: their mean over ranks is what a moving average of the mean statistics would be,
whenever it is taken. So nothing is communicated during training, and the ranks are brought together before somebody
reads the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.utils.distributed import all_reduce, get_world_size


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The layers of `model` that keep running statistics of batches."""
    kind = nn.modules.batchnorm._BatchNorm
    return [m for m in model.modules() if isinstance(m, kind) and m.running_mean is not None]


def share_batch_statistics(layers: Sequence[nn.Module]) -> None:
    """Replace the running means and variances of `layers` by their mean over all ranks. Collective."""
    if not layers or get_world_size() == 1:
        return
    buffers = [_on_this_rank(buffer) for layer in layers for buffer in (layer.running_mean, layer.running_var)]
    values = np.concatenate([buffer.numpy() for buffer in buffers]).astype(np.float64)
    means = (all_reduce(values) / get_world_size()).astype(np.float32)
    ends = np.cumsum([len(buffer) for buffer in buffers])[:-1]
    for buffer, mean in zip(buffers, np.split(means, ends)):
        buffer.copy_(flow.tensor(mean, dtype=buffer.dtype, device=buffer.device))


def count_batches(layers: Sequence[nn.Module], number: int) -> None:
    """Count `number` more batches in `layers`: a compiled step updates the statistics, but not their count."""
    for layer in layers:
        if layer.num_batches_tracked is not None:
            _on_this_rank(layer.num_batches_tracked).add_(number)


def _on_this_rank(buffer: flow.Tensor) -> flow.Tensor:
    """The memory of this rank behind a replicated buffer."""
    return buffer.to_local() if buffer.is_global else buffer
