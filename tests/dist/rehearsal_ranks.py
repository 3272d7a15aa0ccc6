"""Runs with `train.rehearse` and `train.rehearse_every` on two ranks, for test_rehearsal_ranks.py.

Started with the arguments FOLDER by `jobs.run_ranks`, which sets PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import oneflow as flow
import pytest
import toy
from oneflow import nn
from test_parity_in_training import NO_EVALUATION, Averaging, ByRank, Dropping, Wrong

from libai.config import LazyCall, validate
from libai.engine import EagerTrainer, Run, default_setup, hooks
from libai.engine.rehearsal import one_process
from libai.utils.distributed import barrier, gather_objects, get_rank
from libai.utils.errors import UserError


def main(folder: str) -> None:
    rows = {}
    for mode in ("eager", "graph"):
        for model in (Averaging, Dropping):
            rows[f"plain, {mode}, {model.__name__}"] = run(folder, mode, model, "train.rehearse=0")
            words = ["train.rehearse=2", "train.rehearse_every=1"]
            rows[f"checked, {mode}, {model.__name__}"] = run(folder, mode, model, *words)
    ddp = "train.dist.gradient_reduction=ddp"
    rows["plain, ddp"] = run(folder, "eager", Dropping, ddp, "train.rehearse=0")
    rows["checked, ddp"] = run(folder, "eager", Dropping, ddp, "train.rehearse_every=1")
    rows["wrong, graph"] = run(folder, "graph", Wrong)
    rows["wrong, eager"] = run(folder, "eager", ByRank)
    rows["wrong, ddp"] = run(folder, "eager", ByRank, ddp)
    rows["wrong, accumulation"] = run(folder, "eager", ByRank, "train.num_accumulation_steps=2")
    shared = ("train.zero_optimization.enabled=true", "train.zero_optimization.stage=2")
    rows["shared"] = run(folder, "graph", Averaging, *shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_process, "available_bytes", lambda: 10)
        rows["too large"] = run(folder, "graph", Averaging, *shared)
    for value in ("sum", "mean"):
        rows[f"switched to {value}"] = switched(value)
    if get_rank() == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))


def run(folder: str, mode: str, model: Any, *words: str) -> dict[str, Any]:
    """Return the losses of a run of four iterations, and the error of every rank."""
    from contract_runs import make_config

    run.count = getattr(run, "count", 0) + 1  # type: ignore[attr-defined]
    out = Path(folder, f"run_{run.count}")  # type: ignore[attr-defined]
    config = make_config(
        out, mode, NO_EVALUATION, "train.train_iter=4", "train.checkpointer.enabled=false", *words
    )
    config.model = LazyCall(model)()
    error = None
    try:
        Run(default_setup(validate(config, world_size=2))).train()
    except UserError as raised:
        error = str(raised)
    barrier()
    found = {"errors": gather_objects(error), "loss": []}
    if get_rank() == 0 and error is None:
        numbers = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found["loss"] = [row["train/loss"] for row in numbers if "train/loss" in row]
        found["log"] = (out / "log.txt").read_text()
    return found


class Switched(toy.Classifier):
    reduction = "mean"

    def forward(self, x, y):
        logits = self.b(flow.relu(self.a(x)))
        return {"losses": {"cls": nn.functional.cross_entropy(logits, y, reduction=self.reduction)}}


def switched(value: str) -> dict[str, Any]:
    """A run whose updates are all rehearsed, in which a hook sets the reduction of the loss before
    the third one.
    """
    flow.manual_seed(0)
    model = Switched()
    data = toy.batches(6, seed=get_rank())
    trainer = EagerTrainer(model, data, flow.optim.SGD(model.parameters(), lr=0.1))
    switch = hooks.CallbackHook(before_step=lambda one: set_reduction(one, value), priority=5)
    trainer.register_hooks([switch, hooks.RehearsalHook(1)])
    trainer.train(0, 5)
    return {"iters": trainer.completed_iters, "is_global": trainer.layout.is_global}


def set_reduction(trainer: Any, value: str) -> None:
    if trainer.iter == 2:
        trainer.model.reduction = value


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, sys.argv[1])
