"""Train a module in eager or graph mode with libai's trainers, as a benchmark variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oneflow as flow
from oneflow import nn
from train_module import LEARNING_RATE, find_case, initial_weight, loss_of

from libai.benchmark.protocol import Variant
from libai.engine import EagerTrainer, GraphTrainer
from libai.patches.internals import wait_for_device
from libai.torch_names import torch_files
from libai.utils.distributed import prepare_device


class WithLoss(nn.Module):
    """Return the loss of a module in the form that trainers read."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **batch: flow.Tensor) -> dict[str, dict[str, flow.Tensor]]:
        return {"losses": {"loss": loss_of(self.module(*batch.values()))}}


class TrainerVariant(Variant):
    """`EagerTrainer` or `GraphTrainer` with their defaults."""

    samples_per_iter = 1

    def __init__(self, file: Path, name: str, mode: str):
        prepare_device("cpu", is_eager=mode == "eager")
        with torch_files():
            build, batches = find_case(file, name)
        module = build()
        for key, parameter in module.named_parameters():
            numbers = initial_weight(key, tuple(parameter.shape))
            if numbers is not None:
                parameter.data.copy_(flow.from_numpy(numbers))
        optimizer = flow.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
        trainer = GraphTrainer if mode == "graph" else EagerTrainer
        self._trainer = trainer(WithLoss(module), batches, optimizer)
        self._done = 0

    def iterate(self, count: int, losses: bool) -> list[float]:
        """See `Variant.iterate`. The first call includes compilation."""
        found = []
        for number in [1] * count if losses else [count]:
            self._trainer.train(self._done, self._done + number)
            self._done += number
            found.append(self._trainer.fetch_metrics()["train/loss"])
        return found

    def finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        """See `Variant.finish`."""
        wait_for_device()  # a pending update would take a core from the next variant
        return answer
