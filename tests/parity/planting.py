"""How a planted fault is described and built, and the plain loop that it is compared with.

Faults are small models that must train like a plain loop, or be refused, in each mode; `faults.py`
lists all of them.

An entry gives the verdict: *right* (losses, weights and buffers of four updates equal the plain
loop to 1e-5), *refused* (a `UserError` before the first update) or *trains* (the model is not
repeatable, so nothing can be compared). The list does not depend on how the library finds a fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn

from libai.parallel import full_tensor
from libai.utils.tensors import saved_tensor_hooks

UPDATES = 4
WIDTH = 8


@dataclass(frozen=True)
class Fault:
    """A planted fault and its verdict in each mode.

    `named`: text that the error of a refusal must contain.
    """

    build: Callable[[], nn.Module]
    eager: str = "right"
    graph: str = "right"
    named: str = ""
    accumulation: int = 1
    optimizer: str = "momentum"
    options: dict[str, Any] = field(default_factory=dict)


FAULTS = {}
#: variables of a module for faults to change
STEPS = [0]
SCALES = {}

OPTIMIZERS = {
    "momentum": lambda parameters: flow.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "decay": lambda parameters: flow.optim.SGD(parameters, lr=0.1, weight_decay=0.1),
    "rate of zero": lambda parameters: flow.optim.SGD(parameters, lr=0.0, momentum=0.9),
    "adamw": lambda parameters: flow.optim.AdamW(parameters, lr=0.01),
}


class Middle(nn.Module):
    """A layer between two others, with a buffer, a frozen parameter and plain attributes for a
    fault to use.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("average", flow.ones(WIDTH))
        self.register_buffer("scale", flow.linspace(0.5, 2.0, WIDTH))
        self.register_buffer("count", flow.zeros(1, dtype=flow.int64))
        self.teacher = nn.Parameter(flow.linspace(0.5, 2.0, WIDTH), requires_grad=False)
        self.gain = nn.Parameter(flow.ones(WIDTH) * 2.0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls, self.seen, self.last, self.lock = 0, [1.0], None, None


class Net(nn.Module):
    """Two layers and a cross entropy, with a fault between them."""

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.first, self.middle, self.second = nn.Linear(6, WIDTH), middle, nn.Linear(WIDTH, 4)

    def forward(self, x, y):
        return {"losses": {"cls": F.cross_entropy(self.second(self.middle(self.first(x), x)), y)}}


def plant(eager: str = "right", graph: str = "right", *, name: str = "", setup=None, **facts: Any):
    """Add the decorated function as the `forward` of a middle layer; `setup` prepares the layer."""

    def add(forward):
        middle = type("Planted", (Middle,), {"forward": forward, "__module__": forward.__module__})

        def build():
            layer = middle()
            if setup is not None:
                setup(layer)
            return Net(layer)

        FAULTS[name or forward.__name__.replace("_", " ")] = Fault(build, eager, graph, **facts)
        return forward

    return add


def with_a_norm(layer: nn.Module) -> None:
    layer.norm = nn.BatchNorm1d(WIDTH)


def batches(count: int, size: int = 12) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    return [
        {"x": draw((size, 6)).astype(np.float32), "y": rng.integers(0, 4, size)}
        for _ in range(count)
    ]


def build(fault: Fault) -> tuple[nn.Module, flow.optim.Optimizer]:
    """Return a model with the fault and its optimizer, always from the same weights and the same
    Python state.
    """
    reset_python()
    model = fault.build()
    rng = np.random.default_rng(3)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            drawn = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.data.copy_(flow.tensor(drawn * 0.4))
    return model, OPTIMIZERS[fault.optimizer](model.parameters())


def reset_python() -> None:
    """Restore the variables of this module and the random states."""
    STEPS[0] = 0
    SCALES.clear()
    flow.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def plain_loop(fault: Fault, parts: int = 1) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses and the final state of a loop without libai; each batch is cut into
    `parts`.

    The values that the backward pass needs are copied. If they are changed in place, PyTorch raises
    an error, but OneFlow 0.9 uses the new values.
    """
    model, optimizer = build(fault)
    losses = []
    data = batches(UPDATES * fault.accumulation)
    for start in range(0, len(data), fault.accumulation):
        total = 0.0
        for batch in data[start : start + fault.accumulation]:
            for part in range(parts):
                tensors = {
                    name: flow.tensor(np.split(array, parts)[part]) for name, array in batch.items()
                }
                with saved_tensor_hooks(lambda t: t.detach().clone(), lambda t: t):
                    loss = sum(model(**tensors)["losses"].values()) / (fault.accumulation * parts)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, state_of(model)


def state_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: full_tensor(tensor).numpy().copy() for name, tensor in model.state_dict().items()}


def distance(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, expected, strict=True))


def distance_of_states(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference of two tensors with the same name, relative to the largest
    element.
    """
    assert found.keys() == expected.keys()
    return max(
        np.abs(value - expected[name]).max() / max(np.abs(expected[name]).max(), 1e-3)
        for name, value in found.items()
    )
