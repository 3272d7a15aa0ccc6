"""A copy of a trainer's state in memory that can be restored later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import oneflow as flow

from libai.engine.hook_base import HookBase
from libai.scheduler import load_scheduler_state, scheduler_state
from libai.utils.tensors import overwrite


@dataclass(frozen=True)
class Snapshot:
    """A copy, on the device, of everything that an update changes.

    It contains weights, buffers, optimizer, schedule, and the state of hooks with tensors, because these follow the
    weights. It does not contain the data position and other hooks.
    """

    tensors: list[flow.Tensor]
    optimizer: Any
    #: settings of each parameter group: schedules may also change momentum and weight decay
    settings: list[dict[str, Any]]
    schedule: dict[str, Any] | None
    rates: dict[str, float]
    hooks: list[tuple[HookBase, dict[str, Any], dict[str, flow.Tensor]]]

    @classmethod
    def of(cls, trainer: Any) -> Snapshot:
        """Copy the state of `trainer`. Collective in graph mode."""
        scheduler, optimizer = trainer.lr_scheduler, trainer.optimizer
        with flow.no_grad():
            return cls(
                tensors=[tensor.clone() for tensor in _module_tensors(trainer.model)],
                optimizer=trainer.optimizer_state.copy(),
                settings=[dict(group._options) for group in optimizer.param_groups],
                schedule=scheduler_state(scheduler, optimizer),
                rates=trainer.loop.rates,
                hooks=[
                    (hook, hook.state_dict(), {name: tensor.clone() for name, tensor in hook.tensors().items()})
                    for hook in trainer.hooks
                    if hook.overrides("tensors")
                ],
            )

    def restore(self, trainer: Any) -> None:
        """Restore the state of `trainer`, the trainer that was copied, bit for bit. May be called several times."""
        optimizer = trainer.optimizer
        with flow.no_grad():
            for tensor, copied in zip(_module_tensors(trainer.model), self.tensors):
                overwrite(tensor, copied)
            trainer.optimizer_state.put_back(self.optimizer)
            for hook, state, tensors in self.hooks:
                hook.load_state_dict(state)
                hook.load_tensors(tensors)
        if self.schedule is not None:
            load_scheduler_state(trainer.lr_scheduler, self.schedule, optimizer)
        for group, settings in zip(optimizer.param_groups, self.settings):
            group._options.clear()  # not through the group's setters, whose calls the guards of a graph count
            group._options.update(settings)
        trainer.loop.rates = self.rates


def _module_tensors(model: flow.nn.Module) -> list[flow.Tensor]:
    return [p.data for p in model.parameters()] + list(model.buffers())
