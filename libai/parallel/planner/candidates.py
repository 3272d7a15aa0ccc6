"""Which mesh a model should train on: memory and traffic of every candidate, and the one to take. Pure arithmetic.

Memory on a rank is weights, gradients, optimizer state and buffers, all exact, plus the activations that
`libai.parallel.planner.activations` estimates. Sharding over data-parallel ranks is that of ZeRO (Rajbhandari et al.
2020, arXiv:1910.02054): stage 1 optimizer state, 2 and gradients, 3 and weights. Traffic is what one rank sends:
2 (n - 1) / n of the bytes for an all-reduce over n ranks (a ring: reduce-scatter, then all-gather), and half as much
again for ZeRO's third stage (section 7 there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oneflow import nn

from libai.parallel.mesh import Mesh
from libai.parallel.plan import ParallelPlan, ShardingPlan, TensorLayout
from libai.parallel.planner.activations import StageCost, TracedOp, stage_costs
from libai.utils.errors import UserError
from libai.utils.sizes import format_bytes

#: share of a device's memory that is left to OneFlow, CUDA's context and fragments
HEADROOM = 0.1
#: largest share of the time that a rank may wait for other pipeline stages, while another mesh fits
MAX_BUBBLE = 0.25


@dataclass(frozen=True)
class Batch:
    """Samples that one rank feeds one forward pass, and forward passes per iteration."""

    micro: int
    accumulation: int


@dataclass(frozen=True)
class Workload:
    """What is to be trained.

    Attributes:
        model: with local parameters, of which only names, shapes and types count.
        plan: how it can be laid out.
        states: parameter name -> tensors of its shape that the optimizer keeps; frozen parameters are absent.
        batch_for: number of data-parallel ranks -> batch; raises `UserError` where the batch cannot be divided so.
        trace: micro-batch size -> the operations of one forward.
        mode: "eager" or "graph".
        keeps_copy: weights and optimizer state are held twice (`train.replay_non_finite`, skip or rollback).
        reduces_once: eager data-parallel ranks average gradients once per iteration, not once per micro-batch.
        blocks_per_stage: as in `ParallelPlan.arrange`.
    """

    model: nn.Module
    plan: ParallelPlan
    states: Mapping[str, int]
    batch_for: Callable[[int], Batch]
    trace: Callable[[int], Sequence[TracedOp]]
    mode: str = "eager"
    keeps_copy: bool = False
    reduces_once: bool = True
    blocks_per_stage: Sequence[int] | None = None


@dataclass(frozen=True)
class Links:
    """Bytes per second between ranks: within a machine of `ranks_per_machine` ranks, and between machines."""

    within: float
    between: float
    ranks_per_machine: int

    def seconds(self, traffic: Traffic, mesh: Mesh) -> float:
        """Time to send `traffic`. Tensor-parallel ranks are neighbours, then data-parallel ones, then stages."""
        spans = (
            (traffic.tensor, mesh.tensor),
            (traffic.data, mesh.tensor * mesh.data),
            (traffic.pipeline, mesh.size),
        )
        return sum(size / (self.within if span <= self.ranks_per_machine else self.between) for size, span in spans)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    copy: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.copy + self.buffers + self.activations


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one iteration; each number is that of the stage where it is largest."""

    data: int = 0
    tensor: int = 0
    pipeline: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.data + self.tensor + self.pipeline


@dataclass(frozen=True)
class Proposal:
    """One way to train, and what it costs. `bubble`: share of the time in which a rank waits for other stages."""

    mesh: Mesh
    batch: Batch
    zero_stage: int
    recomputes: bool
    memory: Memory
    traffic: Traffic
    bubble: float

    @property
    def samples(self) -> int:
        """Samples per iteration."""
        return self.batch.micro * self.batch.accumulation * self.mesh.data

    def describe(self) -> str:
        """`4 data x 2 tensor x 1 pipeline, ZeRO 1, recomputation`."""
        mesh = f"{self.mesh.data} data x {self.mesh.tensor} tensor x {self.mesh.pipeline} pipeline"
        extras = [f"ZeRO {self.zero_stage}"] if self.zero_stage else []
        return ", ".join([mesh, *extras, *(["recomputation"] if self.recomputes else [])])


@dataclass(frozen=True)
class Proposals:
    """All candidates for a number of ranks: those that the plan allows, and why the others are not."""

    candidates: Sequence[Proposal]
    ruled_out: Mapping[Mesh, str] = field(default_factory=dict)

    def fitting(self, device_memory: int) -> list[Proposal]:
        """The candidates whose need, with `HEADROOM`, is within `device_memory` bytes."""
        return [p for p in self.candidates if p.memory.total <= device_memory * (1 - HEADROOM)]

    def choose(self, device_memory: int, links: Links | None = None) -> Proposal:
        """The fitting candidate that sends least per sample (in seconds with `links`, else in bytes).

        Recomputation costs a third more arithmetic and the bubble wastes it, so what does without either, or waits for
        at most `MAX_BUBBLE` of the time, goes first. Ties go to fewer tensor and pipeline ranks and less sharding.
        Raises `UserError` when nothing fits, with the smallest need and what would help.
        """
        fitting = self.fitting(device_memory)
        if not fitting:
            raise UserError(self._nothing_fits(device_memory))

        def rank(p: Proposal) -> tuple[float, ...]:
            cost = links.seconds(p.traffic, p.mesh) if links else p.traffic.total
            wait = p.bubble if p.bubble > MAX_BUBBLE else 0.0
            return wait, p.recomputes, cost / p.samples, p.mesh.tensor * p.mesh.pipeline, p.mesh.tensor, p.zero_stage

        return min(fitting, key=rank)

    def _nothing_fits(self, device_memory: int) -> str:
        reasons = [f"{m.data} x {m.tensor} x {m.pipeline}: {reason}" for m, reason in self.ruled_out.items()]
        if not self.candidates:
            return "no mesh can be laid out for this model and batch.\n" + "\n".join(reasons)
        least = min(self.candidates, key=lambda p: p.memory.total)
        usable = format_bytes(device_memory * (1 - HEADROOM))
        helps = ["more ranks"]
        if not any(p.zero_stage for p in self.candidates) and least.mesh.data > 1:
            helps.append("ZeRO (train.zero_optimization)")
        if not any(p.recomputes for p in self.candidates):
            helps.append("recomputing activations (train.activation_checkpoint)")
        if least.batch.micro > 1:
            helps.append(f"a micro-batch below {least.batch.micro}")
        if least.memory.copy:
            helps.append("no second copy of the state (train.replay_non_finite=false, train.non_finite=raise)")
        return (
            f"nothing fits into {format_bytes(device_memory)} per rank, of which {usable} are planned with. The "
            f"smallest need on {least.mesh.size} rank(s) is {format_bytes(least.memory.total)}, by {least.describe()}. "
            f"What would help: {', '.join(helps)}."
        )


def propose(
    work: Workload,
    meshes: Iterable[Mesh],
    zero_stages: Sequence[int] = (0,),
    recomputation: Sequence[bool] = (False,),
) -> Proposals:
    """Work out every mesh with every ZeRO stage and with or without recomputation of the blocks.

    What the plan or the batch does not allow is kept with its reason.
    """
    candidates, ruled_out = [], {}
    for mesh in meshes:
        try:
            batch = work.batch_for(mesh.data)
            sharding = work.plan.arrange(work.model, mesh, work.blocks_per_stage)
        except UserError as error:
            ruled_out[mesh] = str(error)
            continue
        costs = stage_costs(work.trace(batch.micro), sharding)
        for zero_stage in zero_stages if mesh.data > 1 else [0]:
            for recomputes in recomputation:
                if recomputes and not sharding.block_names:
                    continue
                candidates.append(_work_out(work, sharding, batch, costs, zero_stage, recomputes))
    return Proposals(candidates, ruled_out)


def meshes_of(
    num_ranks: int, device: str, data: int | None = None, tensor: int | None = None, pipeline: int | None = None
) -> Iterator[Mesh]:
    """Every way to arrange `num_ranks` ranks; a size that is given stays."""
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    for p in divisors:
        for t in (n for n in divisors if num_ranks // p % n == 0):
            mesh = Mesh(num_ranks // (p * t), t, p, device)
            if all(given in (None, size) for given, size in ((data, mesh.data), (tensor, t), (pipeline, p))):
                yield mesh


def _work_out(
    work: Workload,
    sharding: ShardingPlan,
    batch: Batch,
    costs: Sequence[StageCost],
    zero_stage: int,
    recomputes: bool,
) -> Proposal:
    stages = range(sharding.mesh.pipeline)
    parts = [StageWork(sharding, s, batch, costs[s], zero_stage, recomputes) for s in stages]
    per_stage = [stage_memory(work, part) for part in parts]
    sent = [_traffic(work, part) for part in parts]
    traffic = Traffic(max(t.data for t in sent), max(t.tensor for t in sent), max(t.pipeline for t in sent))
    fullest = max(per_stage, key=lambda memory: memory.total)
    bubble = _bubble(work.mode, sharding.mesh.pipeline, batch.accumulation)
    return Proposal(sharding.mesh, batch, zero_stage, recomputes, fullest, traffic, bubble)


def _bubble(mode: str, stages: int, micro_batches: int) -> float:
    """The bubble of a pipeline: (p - 1) / (m + p - 1) of the time (Huang et al. 2019, arXiv:1811.06965). Eager calls
    take one micro-batch through all stages before the next, so that each stage works 1 / p of the time."""
    return (stages - 1) / stages if mode == "eager" else (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True)
class StageWork:
    """One pipeline stage of a candidate. `cost`: of one micro-batch on that stage; the rest as in `Proposal`."""

    sharding: ShardingPlan
    stage: int
    batch: Batch
    cost: StageCost
    zero_stage: int = 0
    recomputes: bool = False

    @property
    def mesh(self) -> Mesh:
        """Of all stages."""
        return self.sharding.mesh

    @property
    def tensors(self) -> list[TensorLayout]:
        """Parameters and buffers that lie on the stage."""
        return [layout for layout in self.sharding.tensors.values() if layout.stage == self.stage]


def stage_memory(work: Workload, part: StageWork) -> Memory:
    """What each rank of a pipeline stage holds while it trains."""
    mesh = part.mesh
    weights = gradients = optimizer = buffers = 0
    for layout in part.tensors:
        full, shard = layout.bytes_per_rank(mesh), shard_bytes(layout, mesh)
        if not layout.is_parameter:
            buffers += full
            continue
        weights += shard if part.zero_stage >= 3 else full
        if layout.name in work.states:
            gradients += shard if part.zero_stage >= 2 else full
            optimizer += work.states[layout.name] * (shard if part.zero_stage >= 1 else full)
    kept = part.cost.kept_with_recomputation if part.recomputes else part.cost.kept
    if work.mode == "graph" and mesh.device == "cpu":
        # OneFlow 0.9 reuses no memory between the operations of a CPU graph: their results, those of the backward pass
        # (about as many) and those computed again all have memory of their own
        kept = part.cost.made * (3 if part.recomputes else 2)
    # a stage works ahead until its first micro-batch has come back: 1F1B of PipeDream-flush (arXiv:2006.09503)
    in_flight = min(part.batch.accumulation, mesh.pipeline - part.stage) if work.mode == "graph" else 1
    copy = weights + optimizer + buffers if work.keeps_copy else 0
    return Memory(weights, gradients, optimizer, copy, buffers, kept * in_flight)


def shard_bytes(layout: TensorLayout, mesh: Mesh) -> int:
    """Bytes of a tensor on each rank when its data-parallel ranks share it too: where one of its axes, after the split
    over tensor-parallel ranks, divides evenly; else all of what the rank holds."""
    shape = list(layout.shape)
    if layout.axis is not None:
        shape[layout.axis] //= mesh.tensor
    full = layout.bytes_per_rank(mesh)
    return full // mesh.data if any(size % mesh.data == 0 for size in shape) else full


def _traffic(work: Workload, part: StageWork) -> Traffic:
    mesh, batch, cost = part.mesh, part.batch, part.cost
    own = [t for t in part.tensors if t.is_parameter]
    trained = sum(t.bytes_per_rank(mesh) for t in own if t.name in work.states)
    once = work.mode == "graph" or (work.reduces_once and mesh.is_data_parallel_only and not part.zero_stage)
    times = 1 if once else batch.accumulation
    gradients = ring(mesh.data) * trained * times
    if part.zero_stage >= 3:
        weights = sum(t.bytes_per_rank(mesh) for t in own)
        # gathered in the forward and again in the backward pass of every micro-batch, reduced and scattered as above
        gradients = ring(mesh.data) / 2 * (trained * times + 2 * weights * batch.accumulation)
    reduced = cost.reduced_forward + cost.reduced_backward + (cost.reduced_again if part.recomputes else 0)
    return Traffic(
        data=round(gradients),
        tensor=round(ring(mesh.tensor) * reduced * batch.accumulation),
        # what is received in the forward pass has its gradient sent back
        pipeline=(cost.sent + cost.received) * batch.accumulation,
    )


def ring(ranks: int) -> float:
    """Bytes that each rank sends per byte of an all-reduce over `ranks` ranks.

    >>> ring(1), ring(2), ring(4)
    (0.0, 1.0, 1.5)
    """
    return 2 * (ranks - 1) / ranks
