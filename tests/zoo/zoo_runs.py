"""A run of a zoo model with libai's trainer, and with the plain loop of one process that defines
the expected result.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow
import zoo_data
from oneflow import nn

from libai.engine import EagerTrainer, GraphTrainer
from libai.engine.hooks import CallbackHook
from libai.parallel import Mesh, full_tensor
from libai.utils.errors import UserError

SOURCES = ("models_sequence", "models_vision", "models_tables", "models_special")
TRAINERS = {"eager": EagerTrainer, "graph": GraphTrainer}
#: the contract between modes and meshes, relative, of each loss; buffers are relative to their
#: largest value
BOUND = 1e-5
#: (data, tensor, pipeline) and the stage of ZeRO, by what they are called here
MESHES = {
    "one": ((1, 1, 1), 0),
    "dp2": ((2, 1, 1), 0),
    "tp2": ((1, 2, 1), 0),
    "pp2": ((1, 1, 2), 0),
    "zero2": ((2, 1, 1), 2),
}

#: one of each kind: tests/zoo trains them on one process, tests/dist all others, and all on several
#: ranks
FAST = (
    "lstm",
    "translator",
    "conv_skips",
    "transposed_convolutions",
    "hard_experts",
    "wide_and_deep",
    "gather_scatter",
    "residual_outside",
    "contrastive",
    "variance_penalty",
    "domain_adversarial",
)

_BODY_AND_HEAD = {"split": {"body.*": 0, "head.weight": 1}}
#: plans given from outside, as a config gives them; other models carry their own or have none
PLANS = {
    **dict.fromkeys(("centred", "class_weights", "gated_in_place"), _BODY_AND_HEAD),
    "contrastive": {"split": {"tower.0.*": 0, "tower.2.weight": 1}},
    "activation_average": {"split": {**_BODY_AND_HEAD["split"], "average": 0}},
    "forward_hooks": {"split": {**_BODY_AND_HEAD["split"], "scale": 0}},
    "wide_and_deep": {"split": {"deep.0.*": 0, "deep.2.weight": 1}},
    "conv_skips": {"blocks": "blocks"},
    "highway_shared": {"blocks": "layers"},
}


def has_plan(name: str, mesh: str) -> bool:
    """Return whether a model has a plan for tensor-parallel ranks or pipeline stages."""
    plan = PLANS.get(name) or getattr(zoo()[name][0], "plan", {})
    return {"tp2": "split", "pp2": "blocks"}.get(mesh, "") in ("", *plan)


@functools.cache
def zoo() -> dict[str, tuple[type[nn.Module], str]]:
    """Return name → (class, kind of its batches) for all models."""
    return {
        name: entry
        for source in SOURCES
        for name, entry in importlib.import_module(source).MODELS.items()
    }


@dataclass(frozen=True)
class Cell:
    """One run: a model in a mode, on a mesh, with a number of micro-batches per update."""

    model: str
    mode: str
    mesh: str = "one"
    accumulation: int = 1

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.mesh} x{self.accumulation}"

    @staticmethod
    def read(text: str) -> Cell:
        """Parse a cell from its `str`."""
        model, mode, mesh, accumulation = text.split()
        return Cell(model, mode, mesh, int(accumulation[1:]))


@dataclass(frozen=True)
class Curve:
    """Losses of all iterations and the final buffers."""

    losses: list[float]
    buffers: dict[str, np.ndarray]


def build(name: str) -> tuple[nn.Module, Any]:
    """Model and optimizer from the same initial weights every time; half of the models have each
    optimizer.
    """
    model = zoo()[name][0]()
    for key, parameter in model.named_parameters():
        parameter.data.copy_(flow.from_numpy(zoo_data.initial_value(key, tuple(parameter.shape))))
    return model, optimizer_of(name, [p for p in model.parameters() if p.requires_grad])


def optimizer_of(name: str, parameters: list[Any]) -> Any:
    """AdamW or SGD with momentum, as in make_twins.py."""
    if optimizer_name(name) == "adamw":
        return flow.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)
    return flow.optim.SGD(parameters, lr=0.05, momentum=0.9)


def optimizer_name(name: str) -> str:
    """Return the name of the optimizer that trains a model."""
    return ("momentum", "adamw")[list(zoo()).index(name) % 2]


def split(batch: zoo_data.Batch, parts: int) -> list[zoo_data.Batch]:
    """Split a batch into equal parts along the samples."""
    return [
        dict(zip(batch, pieces))
        for pieces in zip(*(np.split(value, parts) for value in batch.values()))
    ]


def plain_loop(
    name: str, parts: int = 1, ranks: int = 1, spoil: Callable[[nn.Module], None] | None = None
) -> Curve:
    """What the training is, by hand: full batches of one process, or `parts` micro-batches one
    after the other whose gradients are weighted with their shares.

    `ranks`: each micro-batch is cut once more, into parts that start from the same buffers; the
    mean of what they leave in the buffers stays. `spoil` plants a fault in the model after every
    update.
    """
    model, optimizer = build(name)
    device = next(
        model.parameters()
    ).device  # cpu:1 on rank 1, where from_numpy gives cpu:0 and nn.LSTM minds
    losses = []
    for batch in zoo_data.batches(zoo()[name][1]):
        total = 0.0
        for micro in split(batch, parts):
            before, after = buffers_of(model), []
            for part in split(micro, ranks):
                _set_buffers(model, before)
                inputs = {key: flow.tensor(array, device=device) for key, array in part.items()}
                loss = sum(model(**inputs)["losses"].values())
                share = loss * (_count(model, part) / _count(model, batch))
                share.backward()
                total += share.item()
                after.append(buffers_of(model))
            _set_buffers(
                model, {key: np.mean([one[key] for one in after], axis=0) for key in before}
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if spoil is not None:
            spoil(model)
        losses.append(total)
    return Curve(losses, buffers_of(model))


def _set_buffers(model: nn.Module, values: dict[str, np.ndarray]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(flow.tensor(np.asarray(values[name]), dtype=buffer.dtype))


def _count(model: nn.Module, batch: zoo_data.Batch) -> int:
    if hasattr(model, "num_loss_items"):
        return int((batch["labels"] != -100).sum())
    return len(next(iter(batch.values())))


@functools.cache
def expected(name: str, parts: int = 1, ranks: int = 1) -> Curve:
    """`plain_loop`, kept for the next cell."""
    return plain_loop(name, parts, ranks)


def expected_of(cell: Cell) -> Curve:
    """What a cell must give. A model that couples samples, or keeps state from one forward to the
    next, sees each micro-batch of all ranks as one; batch normalization (docs/dev/decisions/0003)
    that of a rank; for any other it makes no difference how the global batch is cut.
    """
    model = zoo()[cell.model][0]
    if hasattr(model, "sees_ranks"):
        return expected(cell.model, cell.accumulation, MESHES[cell.mesh][0][0])
    keeps_state = bool(list(model().buffers()))
    return expected(
        cell.model, cell.accumulation if keeps_state or hasattr(model, "couples") else 1
    )


def trained(cell: Cell) -> Curve:
    """The same by our trainer on this job's ranks. Raises `UserError`, as `Refused`, for what is
    refused before the first update. Collective.
    """
    shape, zero_stage = MESHES[cell.mesh]
    mesh = Mesh(*shape)
    model, optimizer = build(cell.model)
    pieces = [
        split(batch, cell.accumulation * mesh.data)
        for batch in zoo_data.batches(zoo()[cell.model][1])
    ]
    loader = [
        piece[step * mesh.data + mesh.data_rank]
        for piece in pieces
        for step in range(cell.accumulation)
    ]
    lines = []
    trainer = None
    try:
        trainer = TRAINERS[cell.mode](
            model,
            loader,
            optimizer,
            mesh=mesh,
            plan=PLANS.get(cell.model),
            device="cpu",
            num_accumulation_steps=cell.accumulation,
            zero_stage=zero_stage,
        )
        trainer.register_hooks([CallbackHook(after_step=lambda t: lines.append(t.fetch_metrics()))])
        trainer.train(0, len(pieces))
    except UserError as error:
        if trainer is None or trainer.completed_iters == 0:
            raise Refused(str(error)) from error
        raise
    return Curve([line["train/loss"] for line in lines], buffers_of(trainer.model))


class Refused(Exception):
    """The trainer refused the model before the first update."""


def buffers_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the buffers as full arrays. Collective if they are global."""
    return {name: full_tensor(buffer).numpy().copy() for name, buffer in model.named_buffers()}


def difference(curve: Curve, right: Curve) -> float:
    """Return the largest relative difference of a loss or a buffer; infinite if a value is missing
    or not finite.
    """
    if len(curve.losses) != len(right.losses) or curve.buffers.keys() != right.buffers.keys():
        return float("inf")
    apart = [abs(a / b - 1) for a, b in zip(curve.losses, right.losses)]
    for name, value in right.buffers.items():
        scale = max(float(np.abs(value).max(initial=0)), 1e-3)
        apart.append(
            float(np.abs(curve.buffers[name].astype(np.float64) - value).max(initial=0)) / scale
        )
    worst = max(apart)
    return worst if np.isfinite(worst) else float("inf")
