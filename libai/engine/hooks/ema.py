"""The average of the weights as a hook: it follows every update, and evaluations use it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import oneflow as flow

from libai.engine.hook_base import HookBase
from libai.optim import WeightAverage


class EMAHook(HookBase):
    """Keeps an exponential moving average of the weights, with which the model is evaluated.

    A trainer with `ema_decay` has one. `decay`: see `libai.optim.WeightAverage`. `average`: what it keeps; with
    `average.swapped_in():` gives the model the averages for a block. Checkpoints hold it as the group "ema".
    """

    #: before the hooks that look at losses, which may undo updates, evaluate or save
    priority = 2
    state_key = "ema"

    def __init__(self, decay: float = 0.9999):
        self.average = WeightAverage(decay)

    def before_step(self) -> None:
        """Begins with the weights before the first update."""
        self.average.begin(self.trainer.model)

    def after_step(self) -> None:
        """Takes in the weights of the iteration."""
        self.average.update()

    def evaluating(self) -> AbstractContextManager[None]:
        return self.average.swapped_in()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.average.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average.updates = state["updates"]

    def tensors(self) -> dict[str, flow.Tensor]:
        return self.average.tensors

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Takes `tensors` for the parameters that the model has now; with none the average begins again."""
        if tensors:
            self.average.load(self.trainer.model, tensors)
        else:
            self.average.tensors = {}
