"""The parts of a training as a `Run` builds them, for commands that measure, compare or write down one without a `Run`.

Not here: what only a run has, such as its folder, hooks and checkpoints (libai/engine/run/run.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import oneflow as flow

from libai.config import BatchSizes, batch_sizes_of
from libai.engine.setup import build
from libai.engine.setup.batch_plan import BatchPlan
from libai.parallel import Mesh
from libai.utils.seeding import resolve_seed, seed_everything


@dataclass(frozen=True)
class Parts:
    """What the trainings of one config share. `loader`: of this data rank, with `sizes.micro` samples in a batch."""

    run: Any
    mesh: Mesh
    seed: int
    sizes: BatchSizes
    loader: Any
    plan: BatchPlan

    @classmethod
    def of(cls, run: Any, mesh: Mesh) -> Parts:
        """The parts of a config on a mesh; seeds all generators. Raises `UserError` as a run does."""
        seed = seed_everything(resolve_seed(run.train.seed))
        sizes = batch_sizes_of(run.train, mesh.data)
        loader = build.build_train_loader(run, mesh, sizes.micro, seed)
        return cls(run, mesh, seed, sizes, loader, BatchPlan.of(run.train, sizes, mesh.data, loader))

    def model(self) -> flow.nn.Module:
        """A new model, at every call with the weights that a run starts with."""
        flow.manual_seed(self.seed)  # initial weights depend on nothing that the loader drew
        return build.build_model(self.run)

    def optimizer(self, model: flow.nn.Module) -> flow.optim.Optimizer:
        """The optimizer of `model`, with the rates that follow from the global batch."""
        optimizer = build.build_optimizer(self.run, model)
        build.scale_lr(self.run, optimizer, self.plan)
        return optimizer

    def lr_scheduler(self, optimizer: flow.optim.Optimizer) -> Any:
        """The schedule of `optimizer`, or None."""
        return build.build_lr_scheduler(self.run, optimizer, self.plan)
