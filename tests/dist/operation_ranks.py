"""Cells that compute operations on global tensors and compare values and gradients with those of
one process.

Each operation takes activations `x` (8, 6, 4), a parameter `w` (6, 4) and ids `i` (8, 3), as a
model's forward has them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from case_ranks import MODES, Planned, check_plan, is_detected
from cells import on_ranks, on_rows
from oneflow import nn
from parity_cases import Batches, Case


def assigned_in_place(h: flow.Tensor) -> flow.Tensor:
    """Lists and arrays of indices, without a gradient."""
    h[:, [0, 2]] = 0.0
    h[:, np.array([1])] = 0.5
    h[[[0, 1], [2, 3]]] = 4.0
    return h


#: operations that libai composes, because OneFlow's own are wrong or refused for global tensors
REPAIRED = {
    "stack, last axis": lambda x, w, i: flow.stack([x, x * 2], dim=-1),
    "stack of samples": lambda x, w, i: flow.stack([x[0], x[5]]),
    "list of columns": lambda x, w, i: x[:, [0, 2]],
    "rows by ids": lambda x, w, i: w[i],
    "gather_nd": lambda x, w, i: flow.gather_nd(w, i[:, :1]),
    "scatter_nd": lambda x, w, i: flow.scatter_nd(i[:, :1], x[:, 0], [6, 4]),
    "tensor_scatter_nd_update": lambda x, w, i: flow.tensor_scatter_nd_update(
        w, flow.tensor([[1], [3]]), x[:2, 0]
    ),
    "median": lambda x, w, i: flow.median(x, 1)[0],
    "repeat_interleave": lambda x, w, i: x.repeat_interleave(2, dim=1),
    "select": lambda x, w, i: flow.select(x, 1, -1),
    "new_tensor": lambda x, w, i: x * x.new_tensor([1.0, 2.0, 3.0, 4.0]),
    "zeros_like a sum, filled": lambda x, w, i: (
        x + flow.zeros_like(x.sum(0)).fill_(0.5) + flow.ones_like(x.sum(0))
    ),
    "from_numpy": lambda x, w, i: x * flow.from_numpy(np.arange(4, dtype=np.float32)),
    "eye": lambda x, w, i: x @ flow.eye(4),
    "norm over all axes": lambda x, w, i: x / x.norm() + x.sum(0).norm(),
    "isfinite of a sum": lambda x, w, i: x * flow.isfinite(x.sum(0)).to(x.dtype),
    "diagonal of samples": lambda x, w, i: flow.diagonal(x @ x.transpose(1, 2), 0, 1, 2),
    "assigned by lists": lambda x, w, i: x + assigned_in_place(x.detach() * 1.0),
}


class Applied(nn.Module):
    """An operation on activations that have a gradient, with losses that read its gradient and its
    value.
    """

    def __init__(self, operation: Any):
        super().__init__()
        self.operation = operation
        rng = np.random.RandomState(1)
        self.scale = nn.Parameter(flow.tensor(rng.rand(4).astype(np.float32) + 0.5))
        self.w = nn.Parameter(flow.tensor(rng.randn(6, 4).astype(np.float32)))

    def forward(self, x: flow.Tensor, i: flow.Tensor) -> dict[str, Any]:
        found = self.operation(x * self.scale, self.w, i)
        places = 1 + flow.arange(found.numel()).reshape(found.shape) / found.numel()
        losses = {
            # without a factor for each element, which hides that stack's gradient is wrong
            "gradient": found.pow(2).mean() + 0 * self.w.sum(),
            "value": (found.detach() * places).mean(),
        }
        return {"losses": losses}


def _batches() -> Batches:
    rng = np.random.RandomState(0)
    return [
        {
            "x": rng.randn(8, 6, 4).astype(np.float32),
            "i": rng.randint(0, 6, (8, 3)).astype(np.int64),
        }
        for _ in range(2)
    ]


def _planned(operation: Any) -> Planned:
    case = Case(
        lambda model: flow.optim.SGD(model.parameters(), lr=0.1),
        partial(Applied, operation),
        _batches,
        max_norm=None,
    )
    return Planned(case, options={"gradient_reduction": "global"}, iterations=2)


_ROWS = [(name, mode) for name in REPAIRED for mode in MODES]


@on_rows(2, _ROWS, separator="; ")
def an_operation_sees_the_samples_of_all_ranks(key: str) -> None:
    name, mode = key.split("; ")
    check_plan(_planned(REPAIRED[name]), mode)


@on_ranks(2)
def the_gradient_of_stack_is_wrong_in_oneflow(_: str) -> None:
    """Negative control."""
    plan = _planned(REPAIRED["stack, last axis"])
    wrong = _planned(lambda x, w, i: flow.stack.__wrapped__([x, x * 2], dim=-1))
    assert is_detected(replace(plan, trained_case=wrong.case), "eager")
