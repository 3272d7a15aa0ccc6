"""Hand-written training loops for stock OneFlow, the baseline for measuring the trainers.

They use the same model, batches and optimizer as the trainers, without hooks, schedules, finite
checks or metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn.parallel import DistributedDataParallel

from libai.benchmark.protocol import Unavailable
from libai.parallel import Mesh
from libai.patches.launch_race import close_launch_race
from libai.utils.tensors import clear_gradients

Batch = dict[str, flow.Tensor]
BuildOptimizer = Callable[[nn.Module], Any]
#: runs one update of micro-batches and returns its loss or losses, on the device
Update = Callable[[Sequence[Batch]], flow.Tensor]


class TotalLoss(nn.Module):
    """Wrap a model to return the sum of its losses, because OneFlow's DDP does not support nested
    outputs.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: flow.Tensor) -> flow.Tensor:
        """Return the sum of the losses, a scalar."""
        return sum(self.model(**batch)["losses"].values())


def make_eager_update(
    model: nn.Module,
    build_optimizer: BuildOptimizer,
    accumulation: int,
    max_norm: float | None,
    mesh: Mesh,
) -> Update:
    """Return an eager update of forward, backward, clip and step, which returns the mean loss of
    this rank.

    It uses OneFlow's DDP with several processes.
    """
    total = TotalLoss(model)
    forward = total if mesh.is_single else DistributedDataParallel(total)
    optimizer = build_optimizer(model)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def update(micro_batches: Sequence[Batch]) -> flow.Tensor:
        losses = []
        for batch in micro_batches:
            loss = forward(**batch) / accumulation
            loss.backward()
            losses.append(loss.detach())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        # setting gradients to None saves memory, but breaks the buckets of OneFlow 0.9's DDP
        optimizer.zero_grad(set_to_none=mesh.is_single)
        return sum(losses)

    return update


class _Graph(nn.Graph):
    def __init__(self, model: nn.Module, optimizer: Any, accumulation: int):
        super().__init__()
        self.model = TotalLoss(model)
        self.add_optimizer(optimizer)
        if accumulation > 1:
            self.config.set_gradient_accumulation_steps(accumulation)

    def build(self, batch: Batch) -> flow.Tensor:
        loss = self.model(**batch)
        loss.backward()
        return loss


def make_graph_update(
    model: nn.Module,
    build_optimizer: BuildOptimizer,
    accumulation: int,
    max_norm: float | None,
    mesh: Mesh,
) -> Update:
    """Return an update by a compiled `nn.Graph` that includes the optimizer. It returns the losses
    of the micro-batches.

    It uses global tensors with several processes.
    """
    placement = None if mesh.is_single else mesh.placement()
    if placement is not None:
        model.to_global(placement, flow.sbp.broadcast)
    optimizer = build_optimizer(model)
    groups = optimizer.param_groups
    if max_norm is not None and len(groups) > 1:
        raise Unavailable(
            "a stock nn.Graph clips each parameter group by its own norm, which is a different "
            "update; optim.params=null makes one group for all variants"
        )
    if max_norm is not None:
        groups[0]._enable_clip_grad = True
        groups[0]["clip_grad_max_norm"] = float(max_norm)
        groups[0]["clip_grad_norm_type"] = 2.0
    clear_gradients(model)
    # the trainer does this too: on a busy machine a small stock graph, such as an MLP's, may crash
    # and end the whole benchmark (docs/dev/decisions/0004)
    close_launch_race()
    graph = _Graph(model, optimizer, accumulation)

    def update(micro_batches: Sequence[Batch]) -> flow.Tensor:
        batch = {name: flow.cat([one[name] for one in micro_batches]) for name in micro_batches[0]}
        if placement is not None:
            for name, tensor in batch.items():
                batch[name] = tensor.to_global(placement, flow.sbp.split(0))
        return graph(batch)

    return update
