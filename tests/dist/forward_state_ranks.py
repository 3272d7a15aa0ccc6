"""Trains small models on two ranks and writes how far they are from a plain loop; test_forward_state_ranks.py reads it.

python -m oneflow.distributed.launch --nproc_per_node 2 tests/dist/forward_state_ranks.py RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (HERE.parents[1], HERE.parent, HERE.parent / "forward")]

import numpy as np  # noqa: E402
import oneflow as flow  # noqa: E402
from oneflow import nn  # noqa: E402
from ranks import run_rank  # noqa: E402
from test_forward_state import Averaging, built, data, plain_loop  # noqa: E402
from toy import record_losses  # noqa: E402

from libai.engine import EagerTrainer, GraphTrainer  # noqa: E402
from libai.parallel import Mesh, full_tensor  # noqa: E402
from libai.utils.distributed import get_rank  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402

ITERATIONS = 3


class Recurrent(nn.Module):
    """Two layers in both directions, from no initial state."""

    def __init__(self, kind: str):
        super().__init__()
        self.layer = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return {"losses": {"mse": (self.layer(x.unsqueeze(1))[0] - 1.0).pow(2).mean()}}


class ReadsTwice(nn.Module):
    """A mean over the samples times itself, and an identity matrix made in forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        mean = flow.matmul(self.layer(x), flow.eye(3)).mean(0)
        return {"losses": {"mse": (mean * mean).sum() + (mean.detach() * mean).sum()}}


class Residual(nn.Module):
    """Residual connections outside of the blocks, one of them over all stages."""

    plan = {"blocks": "layers"}

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        first = h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        joined = flow.cat([h[:, :2], first[:, 2:]], 1)
        return {"losses": {"mse": ((self.last(joined).squeeze(1) - x.sum(1)) ** 2).mean()}}


CASES = {
    "copy_": (lambda: Averaging("copy_"), (2, 1, 1), 2),
    "assign": (lambda: Averaging("assign"), (2, 1, 1), 2),
    "LSTM": (lambda: Recurrent("LSTM"), (2, 1, 1), 1),
    "GRU": (lambda: Recurrent("GRU"), (2, 1, 1), 1),
    "twice": (ReadsTwice, (2, 1, 1), 1),
    "residual": (Residual, (1, 1, 2), 1),
}


def apart(make, shape, accumulation, mode) -> dict[str, float]:
    """The largest difference of a loss and of a buffer from the plain loop."""
    mesh = Mesh(*shape)
    batches = data(ITERATIONS * accumulation)
    reference, model = built(make).to("cpu"), built(make)
    expected = plain_loop(reference, batches, accumulation)
    size = len(batches[0]["x"]) // mesh.data
    mine = [{"x": np.ascontiguousarray(b["x"][mesh.data_rank * size :][:size])} for b in batches]
    by_rule = make in (CASES["copy_"][0], CASES["assign"][0])  # whose buffers alone ask for global tensors
    options = {"gradient_reduction": "global"} if mode == "eager" and mesh.data > 1 and not by_rule else {}
    trainer = {"eager": EagerTrainer, "graph": GraphTrainer}[mode](
        model,
        mine,
        flow.optim.AdamW(model.parameters(), lr=0.05),
        num_accumulation_steps=accumulation,
        mesh=mesh,
        device="cpu",
        **options,
    )
    losses = record_losses(trainer)
    trainer.train(0, ITERATIONS)
    buffers = [abs(full_tensor(b).numpy() - r.numpy()).max() for b, r in zip(model.buffers(), reference.buffers())]
    return {
        "loss": float(max(abs(np.array(losses) / np.array(expected) - 1))),
        "buffer": float(max(buffers, default=0.0)),
    }


def refusal() -> str:
    """What eager ranks with a buffer of their own part of the batch say."""
    model = built(lambda: Averaging("copy_"))
    mesh = Mesh(2, 1, 1)
    optimizer = flow.optim.AdamW(model.parameters(), lr=0.05)
    try:
        EagerTrainer(model, data(1), optimizer, mesh=mesh, device="cpu", gradient_reduction="flat").train(0, 1)
    except UserError as error:
        return str(error)
    return ""


def main(target: str) -> None:
    """Train everything and let rank 0 write."""
    rows = {f"{name} {mode}": apart(*case, mode) for name, case in CASES.items() for mode in ("eager", "graph")}
    text = refusal()
    if get_rank() == 0:
        Path(target).write_text(json.dumps({"rows": rows, "refusal": text}), encoding="utf-8")


if __name__ == "__main__":
    run_rank(main, sys.argv[1])
