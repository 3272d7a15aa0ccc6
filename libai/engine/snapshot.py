"""A copy of a trainer's state in memory that can be restored later."""

from __future__ import annotations

from typing import Any

import oneflow as flow

from libai.scheduler import load_scheduler_state, scheduler_state
from libai.utils.tensors import overwrite


class Snapshot:
    """A copy, on the device, of everything that an update of `trainer` changes. Making it is collective in graph mode.

    It contains weights, buffers, optimizer, schedule, and the state of hooks with tensors, because these follow the
    weights. It does not contain the data position and other hooks.
    """

    def __init__(self, trainer: Any):
        with flow.no_grad():
            self._tensors = [tensor.clone() for tensor in _module_tensors(trainer.model)]
            self._optimizer = trainer.optimizer_state.copy()
            self._hooks = [
                (hook, hook.state_dict(), {name: tensor.clone() for name, tensor in hook.tensors().items()})
                for hook in trainer.hooks
                if hook.overrides("tensors")
            ]
        #: settings of each parameter group: schedules may also change momentum and weight decay
        self._settings = [dict(group._options) for group in trainer.optimizer.param_groups]
        self._schedule = scheduler_state(trainer.lr_scheduler, trainer.optimizer)
        self._rates = trainer.loop.rates

    def restore(self, trainer: Any) -> None:
        """Restore the state of `trainer`, the trainer that was copied, bit for bit. May be called several times."""
        optimizer = trainer.optimizer
        with flow.no_grad():
            for tensor, copied in zip(_module_tensors(trainer.model), self._tensors):
                overwrite(tensor, copied)
            trainer.optimizer_state.put_back(self._optimizer)
            for hook, state, tensors in self._hooks:
                hook.load_state_dict(state)
                hook.load_tensors(tensors)
        if self._schedule is not None:
            load_scheduler_state(trainer.lr_scheduler, self._schedule, optimizer)
        for group, settings in zip(optimizer.param_groups, self._settings):
            group._options.clear()  # not through the group's setters, whose calls the guards of a graph count
            group._options.update(settings)
        trainer.loop.rates = self._rates


def _module_tensors(model: flow.nn.Module) -> list[flow.Tensor]:
    return [p.data for p in model.parameters()] + list(model.buffers())
