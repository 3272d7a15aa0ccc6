"""Run the OneFlow variants, which are the trainers and the hand-written loops.

Every rank calls `serve_ranks`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import oneflow as flow

from libai.benchmark.protocol import Unavailable, Variant, serve
from libai.benchmark.raw_loops import make_eager_update, make_graph_update
from libai.engine import HookBase, Run, default_setup
from libai.engine.run.build import RunParts
from libai.launch.guard import leave_at_once
from libai.layers.random import draws_randomness
from libai.parallel import Mesh
from libai.patches.internals import wait_for_device
from libai.utils.distributed import (
    barrier,
    default_device,
    gather_objects,
    get_rank,
    get_world_size,
    is_main_process,
    prepare_device,
)
from libai.utils.seeding import seed_everything


class OneFlowVariant(Variant):
    """A variant that runs on all ranks of a job, on the config's device."""

    def __init__(self, config: Any):
        self._device = default_device(config.train.device)

    def begin(self) -> None:
        """See `Variant.begin`. Collective."""
        barrier()

    def finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        """See `Variant.finish`.

        Reports the slowest rank's time and the total memory. Collective.
        """
        wait_for_device()  # a pending update would take a core from the next variant
        ranks = gather_objects(answer)
        answer["peak_rss_bytes"] = sum(rank["peak_rss_bytes"] for rank in ranks)
        answer["seconds"] = max(rank["seconds"] for rank in ranks)
        # losses are equal on all ranks, except in the hand-written eager loop: there each rank has
        # its own samples
        answer["losses"] = np.mean([rank["losses"] for rank in ranks], axis=0).tolist()
        return answer


class _Pause(HookBase):
    """Pause the training loop after iteration `until`. Record losses if `losses` is a list."""

    priority = 100
    until = 0
    losses: list[float] | None = None

    def after_step(self) -> None:
        if self.losses is not None:
            self.losses.append(self.trainer.fetch_metrics()["train/loss"])
        if self.trainer.completed_iters >= self.until:
            self.trainer.loop.pause()


class TrainerVariant(OneFlowVariant):
    """A variant that runs `Run` as `libai train` does, with its loader, hooks and writers."""

    def __init__(self, config: Any):
        super().__init__(config)
        default_setup(config)
        self._run = Run(config)
        self._pause = _Pause()
        self._run.trainer.register_hooks([self._pause])
        self.samples_per_iter = self._run.plan.global_batch_size

    def iterate(self, count: int, losses: bool) -> list[float]:
        """See `Variant.iterate`. The first call includes compilation."""
        trainer = self._run.trainer
        self._pause.until = trainer.completed_iters + count
        self._pause.losses = [] if losses else None
        if trainer.status == "created":
            seed_everything(self._run.seed)
            self._run.resolve_mode()
            trainer.train(0, 2**31)  # the run is only paused, never finished
        else:
            trainer.train(trainer.iter, trainer.max_iter)
        return self._pause.losses or []

    def finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        """See `Variant.finish`."""
        trainer = self._run.trainer
        answer = super().finish(answer)
        answer["tokens_per_iter"] = trainer.feed.items_per_iter
        return answer


class RawVariant(OneFlowVariant):
    """A hand-written loop in either mode, with the config's model, data and optimizer."""

    def __init__(self, config: Any, mode: str):
        train = config.train
        extras = (train.ema.enabled, train.amp.enabled, train.activation_checkpoint.enabled)
        inner = train.dist.tensor_parallel_size * train.dist.pipeline_parallel_size
        if inner > 1 or any(extras) or train.clip_grad.value is not None:
            raise Unavailable(
                "a hand-written loop has no tensor or pipeline ranks, no average of the weights, "
                "no clipping by value, no AMP and no activation checkpointing"
            )
        super().__init__(config)
        parts = RunParts(config, Mesh.of_this_job(self._device))
        self._loader = iter(parts.train_loader)
        self._accumulation = parts.sizes.accumulation
        self.samples_per_iter = parts.plan.global_batch_size
        model = parts.new_model()
        model = model.to(self._device)
        if draws_randomness(model):
            raise Unavailable(
                "a hand-written loop has different dropout masks; set the dropout rates to 0"
            )
        make_update = make_graph_update if "graph" in mode else make_eager_update
        self._update = make_update(
            model, parts.new_optimizer, self._accumulation, train.clip_grad.max_norm, parts.mesh
        )

    def step(self) -> flow.Tensor:
        """See `Variant.step`."""
        return self._update([self._next_batch() for _ in range(self._accumulation)])

    def read(self, loss: flow.Tensor) -> float:
        """See `Variant.read`.

        A graph returns one loss per micro-batch; the result is their mean.
        """
        return float(loss.numpy().mean())

    def _next_batch(self) -> dict[str, flow.Tensor]:
        tensors = {}
        for name, value in next(self._loader).items():
            tensor = (
                value
                if isinstance(value, flow.Tensor)
                else flow.from_numpy(np.ascontiguousarray(value))
            )
            tensors[name] = tensor.to(self._device)
        return tensors


def serve_ranks(config: Any, mode: str, folder: Path, answers: TextIO) -> None:
    """Answer the controller's requests through rank 0 until its input ends, then exit.

    `folder` is scratch space.
    """

    def build() -> Variant:
        prepare_device(config.train.device, is_eager="graph" not in mode)
        return TrainerVariant(config) if mode in ("eager", "graph") else RawVariant(config, mode)

    def reply(message: Mapping[str, Any]) -> None:
        if is_main_process():
            print(json.dumps(message), file=answers, flush=True)

    serve(build, _lines(folder), reply)
    leave_at_once(0)  # skips OneFlow's exit handlers, which wait for the other ranks


def _lines(folder: Path) -> Iterator[str]:
    """Yield the controller's lines on every rank.

    Rank 0 reads them and forwards them through named pipes.

    OneFlow's broadcast is not used because its scheduler spins while one is pending, and waiting
    must not use the CPU.
    """
    pipes = [folder / f"turn_{rank}" for rank in range(1, get_world_size())]
    if is_main_process():
        for pipe in pipes:
            os.mkfifo(pipe)
    barrier()
    if not is_main_process():
        yield from pipes[get_rank() - 1].open()
        return
    others = [pipe.open("w", buffering=1) for pipe in pipes]
    for line in iter(sys.stdin.readline, ""):
        for other in others:
            other.write(line)
        yield line
