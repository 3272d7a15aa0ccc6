"""Run ZeRO and activation checkpointing on the ranks of one job and write the distance of each from
one plain process.

Started with the arguments RESULT.json by `jobs.run_ranks`, which sets PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import libai  # noqa: F401  (makes `import oneflow` work)

# isort: split
import numpy as np
import oneflow as flow
import toy
from oneflow import nn
from parity_cases import Case, Difference, Result, compare, grouped, plain_loop

from libai.engine import EagerTrainer, GraphTrainer
from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.hooks import CallbackHook
from libai.engine.trainer import TRAINERS
from libai.models import GPT
from libai.parallel import Mesh, full_tensor, named_tensors
from libai.utils.distributed import all_reduce, barrier, broadcast_object, get_rank, get_world_size

ITERATIONS, BATCH, LENGTH, VOCABULARY = 8, 8, 12, 64
MODES = ("eager", "graph")


def texts() -> toy.Batches:
    """Return token batches shorter than the model's longest sequence, with some ignored labels."""
    rng = np.random.RandomState(0)
    made = []
    for _ in range(ITERATIONS):
        ids = rng.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        labels = ids[:, 1:].copy()
        labels[rng.rand(*labels.shape) < 0.2] = -100
        made.append({"input_ids": ids[:, :-1].copy(), "labels": labels})
    return made


def gpt(**options: Any) -> nn.Module:
    """Return a GPT with two blocks and a head that shares the weight of the embedding."""
    return GPT(VOCABULARY, LENGTH + 4, 16, 2, 2, **options)


# eps: with 1e-8 Adam makes much of the rounding in gradients that are nearly zero, and the plain
# loop itself, from weights nudged by their last bit, ends up to 2.6e-6 apart (1.6e-6 with this one;
# parity_variants.py does the same)
CASE = Case(grouped("AdamW", 0.005, eps=1e-3), model=gpt, batches=texts)
DROPOUT = CASE.with_(model=partial(gpt, dropout=0.1))


@dataclass(frozen=True)
class Planned:
    """One run: `options` of the trainer, and the mesh as (tensor, pipeline). `then`: the mode and
    options of a trainer that resumes half-way; without options the first one is switched.
    """

    name: str
    case: Case
    options: dict[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = MODES
    mesh: tuple[int, int] = (1, 1)
    then: tuple[str, dict[str, Any] | None] | None = None


def planned(world: int) -> Iterator[Planned]:
    """Return the runs of a job of `world` ranks, the same on every rank."""
    zero = {stage: {"zero_stage": stage} for stage in (1, 2, 3)}
    recomputed = {"activation_checkpoint": True}
    if world == 4:
        yield Planned("tensor parallel", CASE, zero[3], mesh=(2, 1))
        return
    yield Planned("zero 1", DROPOUT, zero[1])
    yield Planned("zero 2", CASE.with_(max_norm=None), zero[2])
    yield Planned("zero 3", DROPOUT.with_(accumulation=2), zero[3])
    yield Planned("recomputed", DROPOUT.with_(accumulation=2), recomputed, ("eager",))
    yield Planned("recomputed zero 3", DROPOUT, {**recomputed, **zero[3]}, ("eager",))
    # resumed half-way in the other mode, with ZeRO switched on or off
    yield Planned("resumed without", CASE, zero[2], ("eager",), then=("graph", {}))
    yield Planned("resumed with", CASE, {}, ("graph",), then=("eager", zero[3]))
    yield Planned("switched", CASE, zero[3], ("eager",), then=("graph", None))


def trained(plan: Planned, mode: str) -> tuple[Result, Any]:
    """Return the result of a run on this job's mesh, and its last trainer."""
    lines = []

    def note(trainer: Any) -> None:
        lines.append(trainer.fetch_metrics())

    trainer = trainer_of(plan, mode, plan.options)
    trainer.register_hooks([CallbackHook(after_step=note)])
    trainer.train(0, ITERATIONS // 2 if plan.then else ITERATIONS)
    if plan.then is not None:
        mode, options = plan.then
        if options is None:
            trainer.switch_to(mode)
        else:
            trainer = _resumed(trainer, trainer_of(plan, mode, options))
            trainer.register_hooks([CallbackHook(after_step=note)])
        trainer.train(ITERATIONS // 2, ITERATIONS)
    norms = [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]
    losses, rates = [line["train/loss"] for line in lines], [line["train/lr"] for line in lines]
    tensors = {
        name: full_tensor(tensor).numpy().copy() for name, tensor in named_tensors(trainer.model)
    }
    return Result(losses, rates, tensors, norms), trainer


def _resumed(old: Any, new: Any) -> Any:
    """`new` with the state of `old`, by way of a checkpoint."""
    with tempfile.TemporaryDirectory() if get_rank() == 0 else nullcontext() as folder:
        folder = broadcast_object(folder)
        path = TrainerCheckpointer(old, folder, async_save=False).save()
        barrier()
        TrainerCheckpointer(new, folder).load(path)
        barrier()
    return new


def trainer_of(plan: Planned, mode: str, options: dict[str, Any]) -> Any:
    """A new trainer; each data rank takes its part of every micro-batch."""
    case, (tensor, pipeline) = plan.case, plan.mesh
    mesh = Mesh.of_this_job("cpu", tensor=tensor, pipeline=pipeline)
    model, optimizer, _ = case.build()
    micro_batches = []
    for batch in case.batches():
        pieces = toy.split(batch, case.accumulation * mesh.data)
        micro_batches += [pieces[i * mesh.data + mesh.data_rank] for i in range(case.accumulation)]
    return TRAINERS[mode](
        model,
        micro_batches,
        optimizer,
        mesh=mesh,
        device="cpu",
        num_accumulation_steps=case.accumulation,
        max_grad_norm=case.max_norm,
        seed=case.seed,
        **options,
    )


def compared(result: Result, expected: Result) -> Difference:
    """See `parity_cases.compare`; the worst of all ranks. Without the key biases of attention,
    whose gradient is zero but for rounding (softmax ignores a shift), of which Adam makes full
    steps: docs/modes.md.
    """
    kept = {
        name: value
        for name, value in expected.tensors.items()
        if not name.endswith("attention.k.bias")
    }
    own = compare(result, replace(expected, tensors=kept))
    return Difference(*all_reduce(np.array(list(vars(own).values())), "max").tolist())


def bytes_here(trainer: Any) -> dict[str, int]:
    """Return the bytes of parameters and optimizer state: of the whole model, actually on this
    rank, and as planned.
    """
    parameters = list(trainer.model.parameters())
    if isinstance(trainer, GraphTrainer):
        with trainer.optimizer_state.variables() as variables:
            state = [tensor for name, tensor in variables.items() if name.startswith("model.")]
    else:
        copies = trainer.optimizer_state.copy().values()
        state = [
            tensor for entries in copies if isinstance(entries, dict) for tensor in entries.values()
        ]
    sharding = trainer.layout.sharding
    return {
        "whole": sum(p.numel() * p.element_size() for p in parameters),
        "parameters": sum(map(_size_here, parameters)),
        "state": sum(map(_size_here, state)),
        "shares": sharding is not None and sharding.shares_parameters,
    }


def _size_here(tensor: flow.Tensor) -> int:
    local = tensor.to_local() if tensor.is_global else tensor
    return local.numel() * local.element_size()


class Wide(nn.Module):
    """16 layers with 4 MiB of weights each, for tiny batches."""

    plan = {"blocks": "blocks"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(16)])

    def forward(self, x: flow.Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = x + flow.relu(block(x))
        return {"losses": {"square": (x * x).mean()}}


def peak_growth(stage: int) -> int:
    """Return the peak growth of memory in bytes during two eager updates of `Wide`."""
    model = Wide()
    batches = [{"x": np.full((4, 1024), 0.01 * (1 + get_rank()), np.float32)}] * 2
    optimizer = flow.optim.SGD(model.parameters(), lr=1e-3)
    trainer = EagerTrainer(
        model,
        batches,
        optimizer,
        zero_stage=stage,
        mesh=Mesh.of_this_job("cpu"),
        rehearse=0,  # its whole copy of the model, before the first update, is not what is measured
    )
    flow._oneflow_internal.eager.Sync()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    trainer.train(0, 2)
    flow._oneflow_internal.eager.Sync()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def main(target: str) -> None:
    rows = []
    expected = {}
    world = get_world_size()
    growth = {} if world == 4 else {stage: peak_growth(stage) for stage in (2, 3)}
    for plan in planned(world):
        key = (plan.case.model, plan.case.accumulation, plan.case.max_norm)
        if key not in expected:
            # the masks of a micro-batch follow from its number, so that the plain loop cuts the
            # batch as well
            steps = plan.case.accumulation if plan.case.model is DROPOUT.model else 1
            expected[key] = plain_loop(plan.case, steps)
        for mode in plan.modes:
            result, trainer = trained(plan, mode)
            worst = compared(result, expected[key])
            verdict = {"is_rounding": worst.is_rounding(plan.case), **vars(worst)}
            row = {"name": plan.name, "mode": mode, **verdict, "bytes": bytes_here(trainer)}
            rows.append(row)
            if get_rank() == 0:
                print(row, flush=True)
    if get_rank() == 0:
        Path(target).write_text(json.dumps({"rows": rows, "growth": growth}))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, sys.argv[1])
