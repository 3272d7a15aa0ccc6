"""The variants of ours: the trainers and the hand-written loops, in a job whose ranks all call `serve_ranks`."""

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
from libai.benchmark.raw_loops import RawEager, RawGraph
from libai.engine import HookBase, Run, default_setup
from libai.engine.run.build import Parts
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
    """A variant on all ranks of a job."""

    def begin(self) -> None:
        """See `Variant.begin`. Collective."""
        barrier()

    def finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        """See `Variant.finish`: the time of the slowest rank, the sum of what they used. Collective."""
        wait_for_device()  # the last update, or it would take a core from the variant that comes next
        ranks = gather_objects(answer)
        for name in ("cpu_seconds", "peak_rss_bytes"):
            answer[name] = sum(rank[name] for rank in ranks)
        answer["seconds"] = max(rank["seconds"] for rank in ranks)
        # all equal, except for the hand-written eager loop, whose ranks have the losses of their own samples
        answer["losses"] = np.mean([rank["losses"] for rank in ranks], axis=0).tolist()
        return answer


class _Pause(HookBase):
    """Leaves the loop after iteration `until`, and records losses if that is asked."""

    priority = 100
    until = 0
    losses: list[float] | None = None

    def after_step(self) -> None:
        if self.losses is not None:
            self.losses.append(self.trainer.fetch_metrics()["train/loss"])
        if self.trainer.completed_iters >= self.until:
            self.trainer.loop.pause()


class TrainerVariant(OneFlowVariant):
    """`Run` as `libai train` runs it, with its loader, hooks and writers."""

    def __init__(self, config: Any):
        default_setup(config)
        self._run = Run(config)
        self._pause = _Pause()
        self._run.trainer.register_hooks([self._pause])
        self.samples_per_iter = self._run.plan.global_batch_size

    def iterate(self, count: int, losses: bool) -> list[float]:
        """See `Variant.iterate`; the first call compiles."""
        trainer = self._run.trainer
        self._pause.until = trainer.completed_iters + count
        self._pause.losses = [] if losses else None
        if trainer.status == "created":
            seed_everything(self._run.seed)
            self._run.resolve_mode()
            trainer.train(0, 2**31)  # it is only ever paused
        else:
            trainer.train(trainer.iter, trainer.max_iter)
        return self._pause.losses or []

    def finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        """See `Variant.finish`."""
        return {**super().finish(answer), "tokens_per_iter": self._run.trainer.feed.items_per_iter}


class RawVariant(OneFlowVariant):
    """A hand-written loop over the config's model, data and optimizer, in either mode."""

    def __init__(self, config: Any, mode: str):
        train = config.train
        is_plain = train.dist.tensor_parallel_size * train.dist.pipeline_parallel_size == 1
        is_plain = is_plain and not (train.ema.enabled or train.amp.enabled or train.activation_checkpoint.enabled)
        if not is_plain or train.clip_grad.value is not None:
            raise Unavailable(
                "a hand-written loop has no tensor or pipeline ranks, no average of the weights, no clipping by value, "
                "no AMP and no activation checkpointing"
            )
        self._device = default_device(train.device)
        parts = Parts(config, Mesh.of_this_job(self._device))
        self._loader = iter(parts.loader)
        self._accumulation = parts.sizes.accumulation
        self.samples_per_iter = parts.plan.global_batch_size
        model = parts.model()
        if mode == "perturbed":
            for parameter in model.parameters():
                parameter.data.mul_(1 + 2.0**-23 * flow.randn(*parameter.shape).sign())
        model = model.to(self._device)
        if draws_randomness(model):
            raise Unavailable("a hand-written loop draws other dropout masks; set the rates to 0")
        loop = RawGraph if "graph" in mode else RawEager
        self._loop = loop(model, parts.optimizer, self._accumulation, train.clip_grad.max_norm, parts.mesh)

    def step(self) -> flow.Tensor:
        """See `Variant.step`."""
        return self._loop.update([self._next_batch() for _ in range(self._accumulation)])

    def read(self, loss: flow.Tensor) -> float:
        """See `Variant.read`; a graph gives the loss of each micro-batch."""
        return float(loss.numpy().mean())

    def _next_batch(self) -> dict[str, flow.Tensor]:
        tensors = {}
        for name, value in next(self._loader).items():
            tensor = value if isinstance(value, flow.Tensor) else flow.from_numpy(np.ascontiguousarray(value))
            tensors[name] = tensor.to(self._device)
        return tensors


def serve_ranks(config: Any, mode: str, folder: Path, answers: TextIO) -> None:
    """Answer the controller through rank 0 until it has no more lines, then end. `folder`: scratch space."""

    def build() -> Variant:
        prepare_device(config.train.device, is_eager="graph" not in mode)
        return TrainerVariant(config) if mode in ("eager", "graph") else RawVariant(config, mode)

    def reply(message: Mapping[str, Any]) -> None:
        if is_main_process():
            print(json.dumps(message), file=answers, flush=True)

    serve(build, _lines(folder), reply)
    leave_at_once(0)  # OneFlow's own exit handlers wait for the other ranks


def _lines(folder: Path) -> Iterator[str]:
    """Yield the controller's lines on every rank: rank 0 reads them and passes them on through named pipes.

    Not through OneFlow: its scheduler spins while a broadcast is in flight, and waiting must cost nothing.
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
