"""Training by hand, as one would write it for stock OneFlow without a trainer: what the trainers are measured against.

The same model, batches and optimizer as the trainers get. No hooks, no schedule, no finite check, no metrics. Only the
keys of seeded dropout are those of the trainers, one for each micro-batch: with masks of their own the loops would
train another way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn.parallel import DistributedDataParallel

from libai.benchmark.protocol import Unavailable
from libai.layers.random import random_context
from libai.oneflow_fixes.launch_race import protect_graph_launches
from libai.parallel import Mesh

Batch = dict[str, flow.Tensor]


class TotalLoss(nn.Module):
    """The model with its losses added up, since OneFlow's DDP takes no nested outputs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: flow.Tensor) -> flow.Tensor:
        """The scalar that is differentiated."""
        return sum(self.model(**batch)["losses"].values())


def _masks(key: int | flow.Tensor | None, data_rank: int = 0) -> AbstractContextManager[None]:
    return nullcontext() if key is None else random_context(key, data_rank)


class RawEager:
    """Forward, backward, clip, step; OneFlow's DDP with several processes. `clip`: `train.clip_grad`."""

    def __init__(self, model: nn.Module, optimizer: Any, accumulation: int, clip: Any, mesh: Mesh):
        total = TotalLoss(model)
        self._data_rank = mesh.data_rank
        self._forward = total if mesh.is_single else DistributedDataParallel(total)
        self._optimizer, self._accumulation, self._clip = optimizer, accumulation, clip
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # None frees memory, but breaks the buckets of OneFlow 0.9's DDP
        self._set_to_none = mesh.is_single

    def update(self, micro_batches: Sequence[Batch], keys: Sequence[int] = ()) -> flow.Tensor:
        """One update; returns the mean loss of this rank, on the device. `keys`: of dropout, one per micro-batch."""
        mean = None
        for batch, key in itertools.zip_longest(micro_batches, keys):
            with _masks(key, self._data_rank):
                loss = self._forward(**batch)
            if self._accumulation > 1:
                loss = loss / self._accumulation
            loss.backward()
            mean = loss.detach() if mean is None else mean + loss.detach()
        if self._clip.max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip.max_norm)
        for parameter in self._parameters if self._clip.value is not None else ():
            parameter.grad.copy_(parameter.grad.clamp(-self._clip.value, self._clip.value))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=self._set_to_none)
        return mean


class _Graph(nn.Graph):
    def __init__(self, model: nn.Module, optimizer: Any, accumulation: int):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        if accumulation > 1:
            self.config.set_gradient_accumulation_steps(accumulation)

    def build(self, batch: Batch, key: flow.Tensor | None = None) -> flow.Tensor:
        with _masks(key):
            loss = sum(self.model(**batch)["losses"].values())
        loss.backward()
        return loss


class RawGraph:
    """One compiled `nn.Graph` with its optimizer; global tensors with several processes. `clip`: `train.clip_grad`."""

    def __init__(self, model: nn.Module, optimizer: Any, accumulation: int, clip: Any, mesh: Mesh):
        groups, max_norm = optimizer.param_groups, clip.max_norm
        if clip.value is not None:
            raise Unavailable("a stock nn.Graph cannot clip gradients by value, and train.clip_grad.value is set")
        if max_norm is not None and len(groups) > 1:
            raise Unavailable(
                "a stock nn.Graph clips each parameter group by its own norm, which is another training; "
                "optim.params=null makes one group for all variants"
            )
        for group in groups if max_norm is not None else ():
            group._enable_clip_grad = True
            group["clip_grad_max_norm"], group["clip_grad_norm_type"] = float(max_norm), 2.0
        self._placement = None if mesh.is_single else mesh.placement()
        if self._placement is not None:
            _make_global(model, self._placement)
        for parameter in model.parameters():
            parameter.grad = None  # else OneFlow 0.9 leaves it out of the compiled update
        self._graph = _Graph(model, optimizer, accumulation)

    def update(self, micro_batches: Sequence[Batch], keys: Sequence[int] = ()) -> flow.Tensor:
        """One update; returns the losses of the micro-batches, on the device. `keys`: as for `RawEager.update`."""
        batch = micro_batches[0]
        if len(micro_batches) > 1:
            batch = {name: flow.cat([one[name] for one in micro_batches]) for name in batch}
        if self._placement is not None:
            batch = {name: t.to_global(self._placement, flow.sbp.split(0)) for name, t in batch.items()}
        inputs: list[Any] = [batch]
        if keys:
            key = flow.tensor(list(keys), dtype=flow.int64, device=next(iter(micro_batches[0].values())).device)
            inputs.append(key if self._placement is None else key.to_global(self._placement, flow.sbp.broadcast))
        if protect_graph_launches.is_done:
            return self._graph(*inputs)
        # as ours: a stock graph as small as an MLP's may crash on a busy machine (docs/decisions/0006), and would end
        # the benchmark with it
        self._graph._compile(*inputs)
        with protect_graph_launches():
            return self._graph(*inputs)


def _make_global(model: nn.Module, placement: Any) -> None:
    """Replicate all parameters (which stay the optimizer's) and buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to_global(placement, flow.sbp.broadcast)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to_global(placement, flow.sbp.broadcast)
