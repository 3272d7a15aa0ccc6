"""A copy of a trainer's state in memory that can be restored later."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import oneflow as flow

from libai.engine.trainer import ModelTrainer
from libai.parallel import named_tensors
from libai.scheduler import load_scheduler_state, scheduler_state
from libai.utils.tensors import overwrite


class Snapshot:
    """A copy, on the device, of everything that an update of `trainer` changes.

    Making it is collective in graph mode.

    It contains weights, buffers, optimizer, schedule, and the state of hooks with tensors, because
    these follow the weights. It does not contain the data position or other hooks. `weights`:
    arrays with the values of parameters by name. The arrays are kept instead of copies of these
    parameters.
    """

    def __init__(self, trainer: ModelTrainer, weights: Mapping[str, np.ndarray] | None = None):
        with flow.no_grad():
            self._tensors = [
                flow.from_numpy(weights[name]) if weights and name in weights else tensor.clone()
                for name, tensor in named_tensors(trainer.model)
            ]
            self._optimizer = trainer.optimizer_state.copy()
            self._hooks = [
                (
                    hook,
                    hook.state_dict(),
                    {name: tensor.clone() for name, tensor in hook.tensors().items()},
                )
                for hook in trainer.hooks
                if hook.overrides("tensors")
            ]
        #: settings of each parameter group: schedules may also change momentum and weight decay
        self._settings = [dict(group._options) for group in trainer.optimizer.param_groups]
        self._schedule = scheduler_state(trainer.lr_scheduler, trainer.optimizer)
        self._rates = trainer.loop.rates

    def restore(self, trainer: ModelTrainer) -> None:
        """Restore the state of `trainer`, the trainer that was copied, bit for bit.

        May be called several times.
        """
        with flow.no_grad():
            for (_, tensor), copied in zip(named_tensors(trainer.model), self._tensors):
                overwrite(tensor.data, copied)
            trainer.optimizer_state.put_back(self._optimizer)
            for hook, state, tensors in self._hooks:
                hook.load_state_dict(state)
                hook.load_tensors(tensors)
        if self._schedule is not None:
            load_scheduler_state(trainer.lr_scheduler, self._schedule, trainer.optimizer)
        for group, settings in zip(trainer.optimizer.param_groups, self._settings):
            # not through the group's setters, whose calls the guards of a graph count
            group._options.clear()
            group._options.update(settings)
        trainer.loop.rates = self._rates
