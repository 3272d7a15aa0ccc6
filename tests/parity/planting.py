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
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn
from parity_cases import (
    Case,
    build_trainer,
    compare,
    expected_of,
    run,
    tensors_of,
    worst_of_ranks,
)

from libai.utils.distributed import any_rank, get_world_size
from libai.utils.errors import UserError

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


def batches(accumulation: int) -> list[dict[str, np.ndarray]]:
    """Return a batch for each update, for micro-batches of 12 samples."""
    rng = np.random.default_rng(0)
    return [_join([_draw(rng) for _ in range(accumulation)]) for _ in range(UPDATES)]


def _draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "x": rng.standard_normal((12, 6)).astype(np.float32),
        "y": rng.integers(0, 4, 12),
    }


def _join(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def case_of(fault: Fault) -> Case:
    """Return the training of a fault. A micro-batch of all ranks counts as one."""
    return Case(
        lambda model: OPTIMIZERS[fault.optimizer](model.parameters()),
        partial(_build, fault),
        partial(batches, fault.accumulation),
        max_norm=None,
        accumulation=fault.accumulation,
        cut_by="micro-batch",
    )


def _build(fault: Fault) -> nn.Module:
    """Return a model with the fault, always from the same weights and the same Python state."""
    STEPS[0] = 0
    SCALES.clear()
    flow.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = fault.build()
    rng = np.random.default_rng(3)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            drawn = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.data.copy_(flow.tensor(drawn * 0.4))
    return model


def outcome(case: Case, mode: str, **options: Any) -> str:
    """Return `right`, or `wrong: …`, `refused: …` or `late: …` with the difference or the error.

    Collective.
    """
    before = {}
    trainer = None
    try:
        trainer = build_trainer(case, mode, **{"rehearse": None, **options})
        before = tensors_of(trainer.model)
        result = run(trainer, UPDATES)
    except UserError as error:
        after = tensors_of(trainer.model) if before else {}
        has_moved = any(not np.array_equal(after[name], value) for name, value in before.items())
        return f"{'late' if any_rank(has_moved) else 'refused'}: {error}"
    apart = worst_of_ranks(compare(result, expected_of(case, get_world_size())))
    is_right = max(apart.loss, apart.weights) <= 1e-5
    return "right" if is_right else f"wrong: {apart}"
