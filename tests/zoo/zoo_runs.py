"""The models of the zoo as cases: libai's trainers must train them as a plain loop does."""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Any

import oneflow as flow
import zoo_data
from oneflow import nn
from parity_cases import Case, Result, compare, plain_loop

SOURCES = ("models_sequence", "models_vision", "models_tables", "models_special")
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
    "class_weights": _BODY_AND_HEAD,
    "contrastive": {"split": {"tower.0.*": 0, "tower.2.weight": 1}},
    "wide_and_deep": {"split": {"deep.0.*": 0, "deep.2.weight": 1}},
    "conv_skips": {"blocks": "blocks"},
    "highway_shared": {"blocks": "layers"},
}


def has_plan(name: str, mesh: str) -> bool:
    """Return whether a model has a plan for tensor-parallel ranks or pipeline stages."""
    plan = PLANS.get(name) or getattr(zoo()[name][0], "plan", {})
    return {"tp2": "split", "pp2": "blocks"}.get(mesh, "") in ("", *plan)


@cache
def zoo() -> dict[str, tuple[type[nn.Module], str]]:
    """Return name → (class, kind of its batches) for all models."""
    return {
        name: entry
        for source in SOURCES
        for name, entry in importlib.import_module(source).MODELS.items()
    }


def optimizer_name(name: str) -> str:
    """Return the name of the optimizer that trains a model; half of the models have each."""
    return ("momentum", "adamw")[list(zoo()).index(name) % 2]


def _optimizer_of(name: str, model: nn.Module) -> Any:
    """Return AdamW or SGD with momentum, as in make_twins.py."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer_name(name) == "adamw":
        return flow.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)
    return flow.optim.SGD(parameters, lr=0.05, momentum=0.9)


def build(name: str) -> nn.Module:
    """Return a model with the same initial weights every time."""
    model = zoo()[name][0]()
    for key, parameter in model.named_parameters():
        parameter.data.copy_(flow.from_numpy(zoo_data.initial_value(key, tuple(parameter.shape))))
    return model


def case_of(name: str, accumulation: int = 1, iterations: int = zoo_data.ITERATIONS) -> Case:
    """Return the training of a model of the zoo.

    A model that couples samples, or keeps state from one forward to the next, sees each micro-batch
    of all ranks as one; for any other it makes no difference how the global batch is cut.
    """
    model, kind = zoo()[name]
    is_whole = hasattr(model, "couples") or list(model().buffers())
    return Case(
        partial(_optimizer_of, name),
        partial(build, name),
        lambda: zoo_data.batches(kind)[:iterations],
        max_norm=None,
        accumulation=accumulation,
        cut_by="micro-batch" if is_whole else "",
        plan=PLANS.get(name),
    )


@cache
def expected(name: str) -> Result:
    """Return the result of the plain loop over full batches."""
    return plain_loop(case_of(name))


def difference(result: Result, right: Result) -> float:
    """Return the largest relative difference of a loss, or of a tensor by its largest value."""
    apart = compare(result, right)
    return max(apart.loss, apart.weights)
