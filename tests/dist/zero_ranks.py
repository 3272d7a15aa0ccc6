"""Runs ZeRO and activation checkpointing on the ranks of one job and writes how far each is from one plain process.

    python -m oneflow.distributed.launch --nproc_per_node 2 tests/dist/zero_ranks.py RESULT.json [NAME PREFIX …]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "parity")]

import numpy as np  # noqa: E402
from parity_cases import Case, compare, grouped, plain_loop, tensors_of  # noqa: E402

from libai.utils.distributed import all_reduce, broadcast_object, get_rank, get_world_size  # noqa: E402

ITERATIONS, BATCH, LENGTH, VOCABULARY = 20, 8, 12, 64
MODES = ("eager", "graph")


def texts() -> list[dict[str, np.ndarray]]:
    """Token batches shorter than the model's longest sequence, with labels that do not count."""
    rng = np.random.RandomState(0)
    made = []
    for _ in range(ITERATIONS):
        ids = rng.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        labels = ids[:, 1:].copy()
        labels[rng.rand(*labels.shape) < 0.2] = -100
        made.append({"input_ids": ids[:, :-1].copy(), "labels": labels})
    return made


def gpt(**options: Any) -> Any:
    """Two blocks and a head that borrows the weight of the embedding."""
    from libai.models import GPT

    return GPT(VOCABULARY, LENGTH + 4, 16, 2, 2, **options)


#: Adam makes small steps of the rounding noise in gradients that are zero (the bias of an attention key)
CASE = Case(grouped("AdamW", 0.005), model=gpt, batches=texts, weight_bound=5e-5)
DROPOUT = CASE.with_(model=partial(gpt, dropout=0.1))


@dataclass(frozen=True)
class Planned:
    """One run: `options` of the trainer, and the mesh as (tensor, pipeline)."""

    name: str
    case: Case
    options: dict[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = MODES
    mesh: tuple[int, int] = (1, 1)
    is_control: bool = False


def planned(world: int) -> Iterator[Planned]:
    """What a job of `world` ranks runs, the same on every rank."""
    zero = [{"zero_stage": stage} for stage in (1, 2, 3)]
    if world == 4:
        yield Planned("zero with tensor parallel", CASE.with_(accumulation=2), zero[2], mesh=(2, 1))
        yield Planned("zero with pipeline", CASE.with_(accumulation=2), zero[1], mesh=(1, 2))
        return
    yield Planned("zero 1", DROPOUT.with_(accumulation=2), zero[0])
    yield Planned("zero 2", CASE.with_(max_norm=None), zero[1])
    yield Planned("zero 3", DROPOUT.with_(accumulation=2), zero[2])
    recomputed = {"activation_checkpoint": True}
    yield Planned("recomputed", DROPOUT.with_(accumulation=2), recomputed, ("eager",))
    yield Planned("recomputed zero 3", DROPOUT, {**recomputed, **zero[2]}, ("eager",))


def trained(plan: Planned, mode: str) -> tuple[Any, Any]:
    """The result of a run on this job's mesh, and its trainer."""
    from parity_cases import Result

    from libai.engine.hooks import CallbackHook

    trainer = trainer_of(plan, mode)
    lines: list[dict[str, float]] = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: lines.append(t.fetch_metrics()))])
    trainer.train(0, ITERATIONS)
    norms = [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]
    losses, rates = [line["train/loss"] for line in lines], [line["train/lr"] for line in lines]
    return Result(losses, rates, whole_tensors(trainer.model), norms), trainer


def whole_tensors(model: Any) -> dict[str, np.ndarray]:
    """See `parity_cases.tensors_of`; on any mesh."""
    from libai.parallel import named_tensors, whole

    return {name: whole(tensor).numpy().copy() for name, tensor in named_tensors(model)}


def trainer_of(plan: Planned, mode: str, start: int = 0) -> Any:
    """A new trainer for the batches from `start` on; each data rank takes its part of every micro-batch."""
    import toy

    from libai.engine import EagerTrainer, GraphTrainer
    from libai.parallel import Mesh

    case, (tensor, pipeline) = plan.case, plan.mesh
    mesh = Mesh.of_this_job("cpu", tensor=tensor, pipeline=pipeline)
    model, optimizer, _ = case.build()
    micro_batches = []
    for batch in case.batches()[start:]:
        pieces = toy.split(batch, case.accumulation * mesh.data)
        micro_batches += [pieces[i * mesh.data + mesh.data_rank] for i in range(case.accumulation)]
    return {"eager": EagerTrainer, "graph": GraphTrainer}[mode](
        model,
        micro_batches,
        optimizer,
        mesh=mesh,
        device="cpu",
        num_accumulation_steps=case.accumulation,
        max_grad_norm=case.max_norm,
        seed=case.seed,
        **plan.options,
    )


def bytes_here(trainer: Any) -> dict[str, int]:
    """Bytes on this rank of parameters and optimizer state, as they really lie there, and as the plan says."""
    parameters = dict(trainer.model.named_parameters())
    if trainer.mode == "graph":
        variables = [t for name, t in trainer._graph_variables() if name.rpartition("-")[0]]
        state = [t for t in variables if t.ndim]
        state = [t for name, t in trainer._graph_variables() if name.startswith("model.")]
    else:
        state = [t for entries in trainer.optimizer._state.values() if isinstance(entries, dict) for t in entries.values()]
    size = lambda t: (t.to_local() if t.is_global else t).numel() * t.element_size()  # noqa: E731
    arrangement = trainer.layout.arrangement
    return {
        "whole": sum(p.numel() * p.element_size() for p in parameters.values()),
        "parameters": sum(map(size, parameters.values())),
        "state": sum(map(size, state)),
        "planned": arrangement.parameter_bytes(trainer.mesh.pipeline_rank) if arrangement else 0,
    }


def main(target: str, prefixes: list[str]) -> None:
    rows = []
    expected: dict[Any, Any] = {}
    for plan in planned(get_world_size()):
        if prefixes and not plan.name.startswith(tuple(prefixes)):
            continue
        case = plan.case
        # the masks of a micro-batch follow from its number, so that the plain loop cuts the batch as well
        micro = case.accumulation if case.model is DROPOUT.model else 1
        key = (case.model, micro, case.max_norm)
        if key not in expected:
            expected[key] = plain_loop(case, micro)
        for mode in plan.modes:
            result, trainer = trained(plan, mode)
            own = compare(result, expected[key])
            if get_rank()==0: print(sorted([(float(np.abs(result.tensors[n]-v).max()/max(np.abs(v).max(),1e-3)),n) for n,v in expected[key].tensors.items()])[-5:],flush=True)
            worst = type(own)(*all_reduce(np.array(list(vars(own).values())), "max").tolist())
            row = {"name": plan.name, "mode": mode, "is_control": plan.is_control, **vars(worst)}
            row["is_rounding"] = worst.is_rounding(case)
            rows.append({**row, "bytes": bytes_here(trainer)})
            if get_rank() == 0:
                print(row, rows[-1]["bytes"], flush=True)
    if get_rank() == 0:
        Path(target).write_text(json.dumps(rows))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # in OneFlow 0.9.0 a rank that merely raises waits for the others for ever
