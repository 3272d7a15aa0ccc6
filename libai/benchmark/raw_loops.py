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

Batch = dict[str, flow.Tensor]
BuildOptimizer = Callable[[nn.Module], Any]


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


class RawEager:
    """An eager loop of forward, backward, clip and step.

    It uses OneFlow's DDP with several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        build_optimizer: BuildOptimizer,
        accumulation: int,
        max_norm: Any,
        mesh: Mesh,
    ):
        total = TotalLoss(model)
        self._forward = total if mesh.is_single else DistributedDataParallel(total)
        self._optimizer = build_optimizer(model)
        self._accumulation = accumulation
        self._max_norm = max_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # setting gradients to None saves memory, but breaks the buckets of OneFlow 0.9's DDP
        self._set_to_none = mesh.is_single

    def update(self, micro_batches: Sequence[Batch]) -> flow.Tensor:
        """Run one update and return the mean loss of this rank, on the device."""
        losses = []
        for batch in micro_batches:
            loss = self._forward(**batch) / self._accumulation
            loss.backward()
            losses.append(loss.detach())
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=self._set_to_none)
        return sum(losses)


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


class RawGraph:
    """A compiled `nn.Graph` that includes the optimizer.

    It uses global tensors with several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        build_optimizer: BuildOptimizer,
        accumulation: int,
        max_norm: Any,
        mesh: Mesh,
    ):
        self._placement = None if mesh.is_single else mesh.placement()
        if self._placement is not None:
            model.to_global(self._placement, flow.sbp.broadcast)
        optimizer = build_optimizer(model)
        groups = optimizer.param_groups
        if max_norm is not None and len(groups) > 1:
            raise Unavailable(
                "a stock nn.Graph clips each parameter group by its own norm, which is a "
                "different update; optim.params=null makes one group for all variants"
            )
        if max_norm is not None:
            groups[0]._enable_clip_grad = True
            groups[0]["clip_grad_max_norm"] = float(max_norm)
            groups[0]["clip_grad_norm_type"] = 2.0
        for parameter in model.parameters():
            parameter.grad = (
                None  # otherwise OneFlow 0.9 omits the parameter from the compiled update
            )
        # the trainer does this too: on a busy machine a small stock graph, such as an MLP's, may
        # crash and end the whole benchmark (docs/dev/decisions/0004)
        close_launch_race()
        self._graph = _Graph(model, optimizer, accumulation)

    def update(self, micro_batches: Sequence[Batch]) -> flow.Tensor:
        """Run one update and return the losses of the micro-batches, on the device."""
        batch = {name: flow.cat([one[name] for one in micro_batches]) for name in micro_batches[0]}
        if self._placement is not None:
            batch = {
                name: t.to_global(self._placement, flow.sbp.split(0)) for name, t in batch.items()
            }
        return self._graph(batch)
