"""The one scheduler class of libai: it multiplies each group's initial rate by a factor of the iteration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import oneflow as flow
from oneflow.nn.optimizer.lr_scheduler import LRScheduler

from libai.scheduler.schedules import Schedule
from libai.utils.errors import UserError

_logger = logging.getLogger(__name__)


class FactorLR(LRScheduler):
    """Sets `group["lr"] = initial_lr * factor(iteration)` in every parameter group of `optimizer`.

    One `step()` is one iteration, called after the update; the constructor sets the rates of iteration 0. Groups keep
    their own initial rates (OneFlow's `WarmUpLR` refuses groups with different rates). It is an `LRScheduler` of
    OneFlow's so that user code which checks the type accepts it, but it has no compiled form and needs none: graph
    mode reads the rates from the optimizer each iteration, as eager mode does.
    """

    base_lrs: list[float]

    def __init__(self, optimizer: flow.optim.Optimizer, factor: Schedule) -> None:
        self.factor = factor
        super().__init__(optimizer)

    def step(self) -> None:
        """Go on to the next iteration and write its rates into the optimizer."""
        self.last_step += 1
        self._write_rates()

    def get_lr(self, base_lr: float, step: int) -> float:
        """The rate of a group with initial rate `base_lr` at iteration `step`; changes nothing."""
        return base_lr * self.factor(step)

    def state_dict(self) -> dict[str, Any]:
        """`{"last_step": int, "base_lrs": [float]}`: the schedule itself comes from the config."""
        return {"last_step": self.last_step, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: restores the iteration and the initial rates and writes the rates.

        Saved initial rates win over the config's, so that a resumed run continues its curve; a difference is logged.
        Raises `UserError` when the number of groups differs.
        """
        saved = [float(lr) for lr in state_dict["base_lrs"]]
        if len(saved) != len(self.base_lrs):
            raise UserError(
                f"The saved scheduler has {len(saved)} parameter group(s), this run's optimizer has "
                f"{len(self.base_lrs)}, so the rates cannot be matched. Use the parameter group options of the saved "
                "run, or start the schedule anew without the scheduler's state."
            )
        if saved != self.base_lrs:
            _logger.warning("initial learning rates %s of the saved run replace %s of the config", saved, self.base_lrs)
        self.base_lrs = saved
        for group, base_lr in zip(self.optimizer.param_groups, saved):
            group["initial_lr"] = base_lr
        self.last_step = int(state_dict["last_step"])
        self._write_rates()

    def _write_rates(self) -> None:
        factor = self.factor(self.last_step)
        self.update_lrs([base_lr * factor for base_lr in self.base_lrs])
