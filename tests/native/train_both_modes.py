"""Print the kernels in use and the loss of every update of a small GPT in each mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def train(mode: str, iterations: int = 5) -> list[float]:
    """Return the losses of a two-layer GPT with AdamW, on the same random tokens in every
    process.
    """
    import numpy as np
    import oneflow as flow
    import toy

    from libai.models import GPT

    tokens = np.random.RandomState(0).randint(0, 50, (iterations, 4, 17)).astype(np.int64)
    flow.manual_seed(0)
    model = GPT(vocab_size=50, max_seq_length=16, hidden_size=32, num_layers=2)
    batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = toy.trainer_of(mode, model, batches, optimizer)
    losses = toy.record_losses(trainer)
    trainer.train(0, iterations)
    return losses


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.prefix = sys.argv[1]  # the environment's folder, which may contain compiled kernels
    import libai  # noqa: F401
    from libai.native.kernels import kernels_in_use

    losses = {mode: train(mode) for mode in ("eager", "graph")}
    print(json.dumps({"kernels": kernels_in_use(), **losses}), flush=True)
