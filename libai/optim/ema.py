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
    weights are soon forgotten. `updates`: how many the averages have seen.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999):
        if not 0 <= decay < 1:
            raise UserError(f"the decay of averaged weights is {decay!r}; it must be >= 0 and < 1, such as 0.999.")
        self._decay = decay
        self.updates = 0
        self._names = [name for name, _ in model.named_parameters()]
        self._averages: list[flow.Tensor] = []
        self._is_swapped_in = False
        self._find_parameters(model)

    def _find_parameters(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._parameters = [named[name] for name in self._names]

    def begin(self) -> None:
        """Begin with the present weights, unless it has begun."""
        if not self._averages:
            self._averages = [parameter.detach().clone() for parameter in self._parameters]

    def update(self) -> None:
        """Take in the weights after an update. Waits for nothing: the device does it after the update."""
        self.begin()
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        with flow.no_grad():
            for average, parameter in zip(self._averages, self._parameters):
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
            for average, parameter in zip(self._averages, self._parameters):
                weights = parameter.detach().clone()
                parameter.data.copy_(average)
                average.copy_(weights)

    def export(self) -> tuple[dict[str, flow.Tensor], dict[str, Any]]:
        """`(tensors by parameter, JSON-able scalars)`; the tensors are its own. Empty before it has begun."""
        if not self._averages:
            return {}, {}
        return dict(zip(self._names, self._averages)), {"updates": self.updates}

    def load(self, model: nn.Module, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Take what `export` gave, for the parameters that `model` has now. Averages that it lacks begin with the
        present weights. Collective when parameters are global."""
        self._find_parameters(model)
        self.updates = scalars.get("updates", 0)
        self._averages = [
            like_parameter(tensors[name], parameter) if name in tensors else parameter.detach().clone()
            for name, parameter in zip(self._names, self._parameters)
            if scalars
        ]

    def copy(self) -> tuple[int, list[flow.Tensor]]:
        """A copy on the device, for `put_back`."""
        return self.updates, [average.clone() for average in self._averages]

    def put_back(self, copied: tuple[int, list[flow.Tensor]]) -> None:
        """Set the averages to what `copy` gave, which stays usable."""
        self.updates, self._averages = copied[0], [average.clone() for average in copied[1]]
