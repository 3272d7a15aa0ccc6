"""The variants for a config: our trainers, the hand-written loops, and the matrix product that shows the peak.

Each runs in a job of its own, whose ranks all call `serve_ranks`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import oneflow as flow

from libai.benchmark.cases import Mode
from libai.benchmark.protocol import Unavailable, Variant, encode, resources_of_this_process, serve
from libai.benchmark.raw_loops import RawEager, RawGraph
from libai.engine import BatchPlan, HookBase, Run, default_setup
from libai.engine.setup.parts import Parts
from libai.launch.guard import leave_at_once
from libai.layers.random import assign_layer_ids, draws_randomness, fold
from libai.oneflow_fixes.internals import used_cuda_mib, wait_for_device
from libai.optim import WeightAverage
from libai.parallel import Mesh
from libai.utils.distributed import (
    all_reduce,
    barrier,
    default_device,
    gather_objects,
    get_rank,
    get_world_size,
    is_main_process,
)
from libai.utils.seeding import seed_everything

#: iterations of a block that are made before the clock starts: they bring data and code back into the caches
LEAD = 1
#: width of the matrices of the peak measurement, float32
GEMM_SIZE = 1024
#: the training never ends by itself
_NO_END = 2**31


class OneFlowVariant(Variant):
    """A variant whose iterations are OneFlow's: clocks, resources and losses are read alike for all of them."""

    def __init__(self, device: str):
        self.device = device
        #: seconds that the last call of `iterate` has waited for data
        self.data_seconds = 0.0

    def iterate(self, count: int, losses: bool) -> list[float]:
        """Make `count` iterations and wait until they are done; the loss of each if asked, else []. Collective."""
        raise NotImplementedError(f"{type(self).__name__} must define iterate(count, losses)")

    def run(self, iterations: int, losses: bool) -> dict[str, Any]:
        """See `Variant.run`. `seconds` is that of the slowest rank. With losses no lead is made. Collective."""
        before = time.process_time()
        if not losses:
            self.iterate(LEAD, losses=False)
        barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        found = self.iterate(iterations, losses)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        wait_for_device()  # the last update, or it would take a core from the variant that comes next
        seconds, waited = all_reduce(np.array([seconds, self.data_seconds]), "max").tolist()
        return {"seconds": seconds, "data_seconds": waited, "losses": found, **self._resources(before, cpu)}

    def _resources(self, cpu_before: float, run_cpu: float) -> dict[str, Any]:
        device = int(used_cuda_mib()) * 2**20 if self.device == "cuda" else None
        own = {"before": cpu_before, "run": run_cpu, **resources_of_this_process(), "device": device}
        ranks = gather_objects(own)
        on_device = [rank["device"] for rank in ranks]
        return {
            "cpu_seconds": [sum(rank[key] for rank in ranks) for key in ("before", "cpu_seconds")],
            "run_cpu_seconds": sum(rank["run"] for rank in ranks),
            "peak_rss_bytes": sum(rank["peak_rss_bytes"] for rank in ranks),
            "device_bytes": None if None in on_device else sum(on_device),
        }

    def describe(self, **facts: Any) -> dict[str, Any]:
        """The facts of every OneFlow variant, and `facts`. Collective."""
        rss = sum(rank["rss_bytes"] for rank in gather_objects(resources_of_this_process()))
        return {"device": self.device, "processes": get_world_size(), "rss_bytes": rss, **facts}

    def describe_training(self, model: Any, batches: BatchPlan, mode: Mode) -> dict[str, Any]:
        """The facts of a variant that trains `model`. Collective."""
        return self.describe(
            mode=mode.name,
            parameters=sum(p.numel() for p in model.parameters()),
            global_batch_size=batches.global_batch_size,
            batch=batches.describe().partition(", ")[0],
        )


class _Pause(HookBase):
    """Leaves the loop after iteration `until`; adds up waits for data, and records losses where that is asked."""

    priority = 100

    def __init__(self) -> None:
        self.until = 0
        self.losses: list[float] | None = None
        self.data_seconds = 0.0

    def after_step(self) -> None:
        self.data_seconds += self.trainer.feed.seconds
        if self.losses is not None:
            self.losses.append(self.trainer.fetch_metrics()["train/loss"])
        if self.trainer.completed_iters >= self.until:
            self.trainer.loop.pause()


class TrainerVariant(OneFlowVariant):
    """`Run` as `libai train` runs it, with its loader, hooks and writers."""

    def __init__(self, run: Any, mode: Mode):
        default_setup(run)
        self._run = Run(run)
        super().__init__(self._run.mesh.device)
        self._mode, self._pause = mode, _Pause()
        self._run.trainer.register_hooks([self._pause])

    def facts(self) -> dict[str, Any]:
        return self.describe_training(self._run.model, self._run.plan, self._mode)

    def iterate(self, count: int, losses: bool) -> list[float]:
        """See `OneFlowVariant.iterate`; the first call compiles."""
        trainer = self._run.trainer
        self._pause.until = trainer.completed_iters + count
        self._pause.losses = [] if losses else None
        self._pause.data_seconds = 0.0
        if trainer.status == "created":
            seed_everything(self._run.seed)
            self._run.resolve_mode()
            trainer.train(0, _NO_END)
        else:
            trainer.train(trainer.iter, trainer.max_iter)
        self.data_seconds = self._pause.data_seconds
        return self._pause.losses or []

    def run(self, iterations: int, losses: bool) -> dict[str, Any]:
        """See `Variant.run`; adds what the first iteration brings: `build_seconds`, tokens and FLOPs per iteration."""
        answer = super().run(iterations, losses)
        trainer = self._run.trainer
        answer["build_seconds"] = trainer.graph and trainer.graph.build_seconds
        answer["tokens_per_iter"] = trainer.feed.items_per_iter
        flops = trainer.loop.flops.of_update
        answer["flops_per_iter"] = flops and int(flops * self._run.plan.global_batch_size)
        return answer


class RawVariant(OneFlowVariant):
    """A hand-written loop over the config's model, data and optimizer, in either mode."""

    def __init__(self, run: Any, mode: Mode):
        super().__init__(default_device(run.train.device))
        dist = run.train.dist
        if dist.tensor_parallel_size * dist.pipeline_parallel_size > 1:
            raise Unavailable("hand-written loops are data-parallel only, and train.dist asks for more")
        parts, self._mode = Parts.of(run, Mesh.of_this_job(self.device)), mode
        self._loader, self._batches = iter(parts.loader), parts.plan
        self._model = parts.model().to(self.device)
        self._seed, self._iteration = parts.seed, 0
        assign_layer_ids(self._model)
        self._draws_randomness = draws_randomness(self._model)
        if mode.is_perturbed:
            _perturb(self._model)
        loops: dict[str, Any] = {"graph": RawGraph, "eager": RawEager}
        self._loop = loops[mode.base](
            self._model, parts.optimizer(self._model), parts.sizes.accumulation, run.train.clip_grad, parts.mesh
        )
        ema = run.train.ema
        self._average = WeightAverage(ema.decay) if ema.enabled else None
        if self._average is not None:
            self._average.begin(self._model)
        self._num_ranks = parts.mesh.size

    def facts(self) -> dict[str, Any]:
        return self.describe_training(self._model, self._batches, self._mode)

    def iterate(self, count: int, losses: bool) -> list[float]:
        """See `OneFlowVariant.iterate`. Modes that sync read the loss in every iteration, the others once."""
        found: list[float] = []
        self.data_seconds = 0.0
        reads = losses or self._mode.syncs
        loss = None
        for _ in range(count):
            start = time.perf_counter()
            batches = [self._next_batch() for _ in range(self._batches.num_accumulation_steps)]
            self.data_seconds += time.perf_counter() - start
            loss = self._loop.update(batches, self._dropout_keys(len(batches)))
            self._iteration += 1
            if self._average is not None:
                self._average.update()
            if reads:
                value = float(loss.numpy().mean())
                if losses:
                    found.append(self._mean_over_ranks(value))
        if loss is not None and not reads:
            loss.numpy()  # waits for the device, on every rank
        return found

    def _dropout_keys(self, micro_batches: int) -> list[int]:
        """As a trainer draws them; none for a model that draws nothing."""
        return [fold(self._seed, self._iteration, micro) for micro in range(micro_batches * self._draws_randomness)]

    def _next_batch(self) -> dict[str, flow.Tensor]:
        tensors = {}
        for name, value in next(self._loader).items():
            tensor = value if isinstance(value, flow.Tensor) else flow.from_numpy(np.ascontiguousarray(value))
            tensors[name] = tensor.to(self.device)
        return tensors

    def _mean_over_ranks(self, value: float) -> float:
        if self._mode.base == "graph" or self._num_ranks == 1:
            return value  # the loss of a graph over global tensors is that of the global batch
        return float(all_reduce(np.array([value]))[0]) / self._num_ranks


def _perturb(model: flow.nn.Module) -> None:
    """Change every weight by its last bit, up or down."""
    generator = np.random.default_rng(0)
    for parameter in model.parameters():
        value = parameter.numpy()
        bits = np.finfo(value.dtype).eps * generator.choice([-1.0, 1.0], value.shape)
        parameter.data.copy_(flow.tensor((value * (1.0 + bits)).astype(value.dtype)))


class GemmVariant(OneFlowVariant):
    """One float32 matrix product per iteration and rank: what this build of OneFlow can reach on this machine."""

    def __init__(self, run: Any, mode: Mode):
        super().__init__(default_device(run.train.device))
        generator = np.random.default_rng(get_rank())
        self._a, self._b = (
            flow.tensor(generator.standard_normal((GEMM_SIZE, GEMM_SIZE), dtype=np.float32), device=self.device)
            for _ in range(2)
        )

    def facts(self) -> dict[str, Any]:
        return self.describe(mode="gemm", flops_per_iter=2 * GEMM_SIZE**3 * get_world_size())

    def iterate(self, count: int, losses: bool) -> list[float]:
        """See `OneFlowVariant.iterate`; a product has no loss."""
        product = self._a
        for _ in range(count):
            product = flow.matmul(self._a, self._b)
        product[:1, :1].numpy()
        return []


def serve_ranks(run: Any, mode: Mode, folder: Path, answers: TextIO) -> None:
    """Answer the controller through rank 0 until it says quit, then end. `folder`: scratch space of this variant."""

    def build() -> Variant:
        return (GemmVariant if mode.base == "gemm" else RawVariant if mode.is_raw else TrainerVariant)(run, mode)

    def reply(message: Mapping[str, Any]) -> None:
        if is_main_process():
            answers.write(encode(message))
            answers.flush()

    serve(build, _messages(folder), reply)
    leave_at_once(0)  # OneFlow's own exit handlers wait for the other ranks


def _messages(folder: Path) -> Iterator[str]:
    """The controller's lines on every rank: rank 0 reads them and passes them on through named pipes.

    Not through OneFlow: its scheduler spins while a broadcast is in flight, and waiting must cost nothing.
    """
    if get_world_size() == 1:
        return iter(sys.stdin.readline, "")
    own = folder / f"turn_{get_rank()}"
    if not is_main_process():
        os.mkfifo(own)
    barrier()
    if is_main_process():
        return _pass_on([open(folder / f"turn_{rank}", "w") for rank in range(1, get_world_size())])
    return iter(open(own).readline, "")


def _pass_on(others: list[TextIO]) -> Iterator[str]:
    for line in iter(sys.stdin.readline, ""):
        for pipe in others:
            pipe.write(line)
            pipe.flush()
        yield line
