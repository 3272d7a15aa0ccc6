"""Compute operations on global tensors on two ranks, and write the distance of values and gradients
from one process.

Started with the arguments RESULT.json eager|graph by `jobs.run_ranks`, which sets PYTHONPATH.

Each takes activations `x` (8, 6, 4), a parameter `w` (6, 4) and ids `i` (8, 3), as a model's
forward has them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from ranks import run_rank

from libai.parallel import Mesh, ParallelPlan, full_tensor, parallelize
from libai.utils.distributed import get_rank


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
#: OneFlow's own operations, which the test must find to be wrong
CONTROL = {"stack, last axis": lambda x, w, i: flow.stack.__wrapped__([x, x * 2], dim=-1)}


class Applied(nn.Module):
    """An operation on activations that have a gradient."""

    def __init__(self, operation: Any):
        super().__init__()
        self.operation = operation
        rng = np.random.RandomState(1)
        self.scale = nn.Parameter(flow.tensor(rng.rand(4).astype(np.float32) + 0.5))
        self.w = nn.Parameter(flow.tensor(rng.randn(6, 4).astype(np.float32)))

    def forward(self, x: flow.Tensor, i: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        found = self.operation(x * self.scale, self.w, i)
        return found.pow(2).mean() + 0 * self.w.sum(), found


class Step(nn.Graph):
    """A compiled update."""

    def __init__(self, model: nn.Module, optimizer: Any, source_ops: Any):
        super().__init__()
        self.model, self.source_ops = model, source_ops
        self.add_optimizer(optimizer)

    def build(self, x: flow.Tensor, i: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        with self.source_ops():
            loss, found = self.model(x, i)
        loss.backward()
        return loss, found


def updated(operation: Any, mode: str, mesh: Mesh | None) -> list[np.ndarray]:
    """Return the operation's value and the parameters after an update, on all ranks together or
    only on this one.
    """
    rng = np.random.RandomState(0)
    batch = {
        "x": rng.randn(8, 6, 4).astype(np.float32),
        "i": rng.randint(0, 6, (8, 3)).astype(np.int64),
    }
    model = Applied(operation)
    if mesh is None:
        loss, found = model(**{name: flow.tensor(array) for name, array in batch.items()})
        loss.backward()
        flow.optim.SGD(model.parameters(), lr=0.1).step()
    else:
        layout = parallelize(model, ParallelPlan.of(model, {}), mesh)
        part = slice(4 * mesh.data_rank, 4 * mesh.data_rank + 4)
        inputs = layout.lay_out_batch(
            {name: flow.tensor(array[part]) for name, array in batch.items()}
        )
        optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
        if mode == "graph":
            _, found = Step(model, optimizer, layout.source_ops)(inputs["x"], inputs["i"])
        else:
            with layout.source_ops():
                loss, found = model(**inputs)
            loss.backward()
            optimizer.step()
    return [full_tensor(tensor).numpy() for tensor in (found, *model.parameters())]


def apart(name: str, operation: Any, mode: str, mesh: Mesh) -> float:
    """Return the largest difference from one process, relative to the largest value."""
    expected, found = updated(REPAIRED[name], "eager", None), updated(operation, mode, mesh)
    return max(
        float(abs(a - b).max()) / max(float(abs(a).max()), 1.0) for a, b in zip(expected, found)
    )


def main(target: str, mode: str) -> None:
    """Compute everything and let rank 0 write."""
    mesh = Mesh(2, 1, 1)
    rows = {name: apart(name, operation, mode, mesh) for name, operation in REPAIRED.items()}
    control = {name: apart(name, operation, "eager", mesh) for name, operation in CONTROL.items()}
    if get_rank() == 0:
        Path(target).write_text(json.dumps({"rows": rows, "control": control}), encoding="utf-8")


if __name__ == "__main__":
    run_rank(main, *sys.argv[1:])
