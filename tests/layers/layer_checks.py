"""Helpers of the layer tests: run a layer in each mode, eagerly or compiled, on local or global
tensors.
"""

from collections.abc import Callable

import numpy as np
import oneflow as flow
from oneflow import nn

CPU = flow.placement("cpu", [0])
SPLIT, BROADCAST = flow.sbp.split(0), flow.sbp.broadcast

#: ways to run a layer; "eager" is the reference
WAYS = ["eager", "global", "graph", "graph-global"]


class _Step(nn.Graph):
    """The output of `module`, with the gradients in the parameters' updates: rate 1, so that update
    = -gradient.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.add_optimizer(flow.optim.SGD(module.parameters(), lr=1.0))

    def build(self, x, grad):
        y = self.module(x)
        (y * grad).sum().backward()
        return y


class _WithInput(nn.Module):
    """Adds a parameter to the input, whose gradient is then the gradient of the input."""

    def __init__(self, layer: Callable, shape: tuple[int, ...]):
        super().__init__()
        self.layer = layer
        self.shift = nn.Parameter(flow.zeros(*shape))

    def forward(self, x):
        return self.layer(x + self.shift)


def run(layer: nn.Module, x: np.ndarray, grad: np.ndarray, way: str) -> dict[str, np.ndarray]:
    """Output `y`, and the gradients `x`, and of each parameter, by the name it has in `layer`."""
    module = _WithInput(layer, x.shape)
    inputs = [flow.tensor(x), flow.tensor(grad)]
    if way.endswith("global"):
        inputs = [tensor.to_global(CPU, SPLIT) for tensor in inputs]
        module.to_global(CPU, BROADCAST)
        # the gradient of each sample belongs where the sample is
        module.shift = nn.Parameter(flow.zeros(*x.shape).to_global(CPU, SPLIT))
    before = {name: p.numpy().copy() for name, p in module.named_parameters()}
    if way.startswith("graph"):
        y = _Step(module)(*inputs)
        grads = {name: before[name] - p.numpy() for name, p in module.named_parameters()}
    else:
        y = module(inputs[0])
        (y * inputs[1]).sum().backward()
        grads = {name: p.grad.numpy() for name, p in module.named_parameters()}
    named = {name.removeprefix("layer."): value for name, value in grads.items()}
    return {"y": y.numpy(), "x": named.pop("shift"), **named}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference divided by the largest expected magnitude."""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))
