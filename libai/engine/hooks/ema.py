"""A hook that averages the weights after every update and uses the average in evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import oneflow as flow

from libai.engine.hook_base import HookBase
from libai.engine.trainer import ModelTrainer
from libai.optim import WeightAverage


class EMAHook(HookBase):
    """Keeps an exponential moving average of the weights and evaluates the model with it.

    A trainer with `ema_decay` registers this hook. `decay`: see `libai.optim.WeightAverage`.
    `average`: the averaged weights. The context manager `average.swapped_in()` puts them into the
    model for a block. Checkpoints store them as the tensor group "ema".
    """

    trainer: ModelTrainer

    #: runs before hooks that check losses, because these may undo updates, evaluate or save
    priority = 2
    state_key = "ema"

    def __init__(self, decay: float = 0.9999):
        self.average = WeightAverage(decay)

    def before_step(self) -> None:
        """Initializes the average with the weights before the first update."""
        self.average.begin(self.trainer.model)

    def after_step(self) -> None:
        """Adds the weights of the iteration to the average."""
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
        """Loads `tensors` for the current parameters of the model.

        Without tensors the average starts again.
        """
        if tensors:
            self.average.load(self.trainer.model, tensors)
        else:
            self.average.tensors = {}
