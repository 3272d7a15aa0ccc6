"""An exponential moving average of the weights, which is often better than the latest ones in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.optim.state import like_parameter
from libai.utils.errors import UserError


class WeightAverage:
    """The averages of a model's parameters, each with the layout of its parameter; buffers are not averaged.

    They begin as the weights before the first update. `decay`: share of the old average that an update keeps. It begins
    at 0.1 and rises as (1 + n) / (10 + n) with the number of updates until it reaches `decay`, so that the initial
    weights are soon forgotten. `updates`: how many the averages have seen. `tensors`: the averages by the names of
    their parameters; empty before `begin`.
    """

    def __init__(self, decay: float = 0.9999):
        if not 0 <= decay < 1:
            raise UserError(f"the decay of averaged weights is {decay!r}; it must be >= 0 and < 1, such as 0.999.")
        self._decay = decay
        self.updates = 0
        self.tensors: dict[str, flow.Tensor] = {}
        self._parameters: list[flow.Tensor] = []
        self._is_swapped_in = False

    def begin(self, model: nn.Module) -> None:
        """Begin with the present weights of `model`, unless it has begun."""
        if not self.tensors:
            self.load(model, {})

    def load(self, model: nn.Module, tensors: Mapping[str, Any]) -> None:
        """Continue from `tensors`, for the parameters that `model` has now; an average that is missing begins with the
        present weight. Collective when parameters are global."""
        named = dict(model.named_parameters())
        self._parameters = list(named.values())
        self.tensors = {
            name: like_parameter(tensors[name], parameter) if name in tensors else parameter.detach().clone()
            for name, parameter in named.items()
        }

    def update(self) -> None:
        """Take in the weights after an update. Waits for nothing: the device does it after the update."""
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        with flow.no_grad():
            for average, parameter in zip(self.tensors.values(), self._parameters):
                # in this form the average of a weight that does not change is that weight, to the last bit
                average.add_(parameter - average, alpha=1 - decay)
        self.updates += 1

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the averages for its weights in this block, and its own again afterwards, bit for bit."""
        if self._is_swapped_in:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """In place: a compiled graph reads the memory of the parameters."""
        self._is_swapped_in = not self._is_swapped_in
        with flow.no_grad():
            for average, parameter in zip(self.tensors.values(), self._parameters):
                weights = parameter.detach().clone()
                parameter.data.copy_(average)
                average.copy_(weights)
