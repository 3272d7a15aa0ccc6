"""Exponential moving average of the weights, which often evaluates better than the latest
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.optim.state import like_parameter
from libai.utils.sizes import check_range


class WeightAverage:
    """Moving averages of a model's parameters, each with the layout of its parameter.

    Buffers are not averaged.

    The averages start as the weights before the first update. `decay` is the fraction of the old
    average that an update keeps. The effective decay starts at 0.1 and rises as (1 + n) / (10 + n)
    after n updates until it reaches `decay`, so the initial weights are forgotten quickly.
    `updates` is the number of updates so far. `tensors` maps parameter names to averages and is
    empty before `begin`.
    """

    def __init__(self, decay: float = 0.9999):
        check_range("0 <= x < 1", decay=decay)
        self._decay = decay
        self.updates = 0
        self.tensors: dict[str, flow.Tensor] = {}
        self._parameters: list[flow.Tensor] = []
        self._is_swapped_in = False

    def begin(self, model: nn.Module) -> None:
        """Initialize the averages with the current weights of `model`, unless this was done
        before.
        """
        if not self.tensors:
            self.load(model, {})

    def load(self, model: nn.Module, tensors: Mapping[str, Any]) -> None:
        """Continue from the averages in `tensors`, for the current parameters of `model`.

        A missing average starts as the current weight. Collective if parameters are global.
        """
        named = dict(model.named_parameters())
        self._parameters = list(named.values())
        self.tensors = {
            name: like_parameter(tensors[name], parameter)
            if name in tensors
            else parameter.detach().clone()
            for name, parameter in named.items()
        }

    def update(self) -> None:
        """Update the averages with the current weights.

        Does not wait: the device computes them after the update.
        """
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        with flow.no_grad():
            for average, parameter in zip(self.tensors.values(), self._parameters):
                # written this way, the average of a constant weight stays bit-equal to the weight
                average.add_(parameter - average, alpha=1 - decay)
        self.updates += 1

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights with the averages inside the block, and restore them bit for
        bit afterwards.
        """
        if self._is_swapped_in:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Swap weights and averages in place, because a compiled graph reads the parameters'
        memory.
        """
        self._is_swapped_in = not self._is_swapped_in
        with flow.no_grad():
            for average, parameter in zip(self.tensors.values(), self._parameters):
                weights = parameter.detach().clone()
                parameter.data.copy_(average)
                average.copy_(weights)
