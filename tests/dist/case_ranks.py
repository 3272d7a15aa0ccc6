"""Cells that train a case on a mesh and compare it with the plain loop of one process, and faults
planted in the library that the comparison must detect.

Every rank runs the plain loop on local tensors by itself, so a rank that drifts from the others is
also detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import families
import numpy as np
import oneflow as flow
from cells import on_ranks, on_rows
from families import CLIPPED, IMAGES, TEXT, VISION, PlainModel, plain
from pairs import daily_rows
from parity_cases import (
    OPTIMIZERS,
    Case,
    Difference,
    build_trainer,
    compare,
    expected_of,
    run,
    worst_of_ranks,
)
from parity_variants import ADAMW, MOMENTUM, VARIANTS, MeanOfMeans, scheduled

from libai.checkpoint import load_weights
from libai.data import build_eval_loader
from libai.engine import eager, inputs, trainers
from libai.engine import trainer as trainer_module
from libai.evaluation import ClassificationEvaluator
from libai.layers import add_lora
from libai.parallel import Mesh, data_parallel
from libai.parallel.data_parallel import FlatReduction, OneFlowDDP
from libai.utils.errors import UserError

MODES = ("eager", "graph")
#: the contract between meshes; two data-parallel ranks have the bound of one process
MESH_LOSS_BOUND, LOGIT_BOUND = 1e-5, 2e-4
EVAL_SAMPLES = 13  # not a multiple of any micro-batch: the end is replicated
#: shape (data, tensor, pipeline) of the mesh of each kind of parallelism on two ranks
MESHES = {"data": (2, 1, 1), "tensor": (1, 2, 1), "pipeline": (1, 1, 2)}


@dataclass(frozen=True)
class Planned:
    """A case on a mesh, with `options` of the trainer.

    `iterations`: of those that the case has batches for. `fault`: a context for the trainer, not
    the plain loop, whose effect must be detected, as that of `trained_case`.
    """

    case: Case
    mesh: tuple[int, int, int] = MESHES["data"]
    options: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 3
    evaluates: bool = False
    fault: Callable[[], AbstractContextManager[Any]] | None = None
    trained_case: Case | None = None


def trained_on_ranks(plan: Planned, mode: str) -> tuple[Difference, Any]:
    """Return the largest difference from the plain loop on any rank, and the trainer.

    Collective.
    """
    mesh = Mesh(*plan.mesh)
    count = plan.iterations
    case, other = (
        case.with_(batches=lambda case=case: case.batches()[:count])
        for case in (plan.case, plan.trained_case or plan.case)
    )
    with (plan.fault or nullcontext)():
        trainer = build_trainer(other, mode, mesh, **plan.options)
        result = run(trainer, count)
    expected = expected_of(case, mesh.data)
    assert expected.losses[0] != expected.losses[-1]  # untrained models would be trivially equal
    if plan.evaluates:
        _compare_evaluation(plan, trainer, expected.tensors)
    return worst_of_ranks(compare(result, expected)), trainer


def check_plan(plan: Planned, mode: str) -> Any:
    """Return the trainer of a plan that trains as one process does. Collective."""
    difference, trainer = trained_on_ranks(plan, mode)
    bound = MESH_LOSS_BOUND if plan.mesh != MESHES["data"] else None
    assert difference.is_rounding(plan.case, bound), difference
    return trainer


# ----------------------------------------------------------------------------------------------
# two data-parallel ranks


def _data_parallel() -> dict[str, Case]:
    """Return cases for two data-parallel ranks.

    An update on one process is compared in test_equivalence.py; ranks add the reduction of what
    each kind reads. Model families are trained on every kind of mesh below.
    """
    kinds = ("momentum", "adamw", "lamb", "adagrad", "rmsprop", "adadelta")
    cases = {
        f"optimizer {name}": Case(OPTIMIZERS[name], accumulation=(1, 2, 4)[number % 3])
        for number, name in enumerate(kinds)
    }
    cases |= VARIANTS
    for name in ("dropout", "batch_norm"):
        cases[f"{name} accumulation"] = VARIANTS[name].with_(accumulation=2)
    # schedules run on the host and do not depend on ranks: one of ours and one that no graph could
    # compile are enough
    for name in ("cosine", "stock_lambda"):
        cases[f"schedule {name}"] = scheduled(name)
    return cases


def _ddp() -> dict[str, Case]:
    """Return possible mistakes of OneFlow's DDP: accumulation, unreached, frozen and shared
    parameters, buffers.
    """
    names = ("unused_adamw", "frozen_in_a_group", "tied", "no_clip", "batch_norm")
    return {
        **{f"adamw x{count}": Case(ADAMW, accumulation=count) for count in (1, 4)},
        **{name: VARIANTS[name] for name in names},
        "dropout": VARIANTS["dropout"].with_(accumulation=2),
    }


DATA_PARALLEL = _data_parallel()
DDP = _ddp()
_ROWS = [(name, mode) for name in DATA_PARALLEL for mode in MODES]


def _check_case(case: Case, mode: str) -> None:
    check_plan(Planned(case, iterations=len(case.batches()) if case.schedule else 3), mode)


@on_rows(2, _ROWS)
def trains_on_data_parallel_ranks(key: str) -> None:
    name, mode = key.split(", ")
    _check_case(DATA_PARALLEL[name], mode)


@on_ranks(2, DDP)
def trains_with_ddp(name: str) -> None:
    _check_case(DDP[name], "ddp")


# ----------------------------------------------------------------------------------------------
# faults of data-parallel ranks


@contextmanager
def _zeros_for_unreached() -> Iterator[None]:
    """Return zeros for unreached gradients, as both reductions do before they remove the gradients
    that no rank has.
    """

    def keep_zeros(reduction: FlatReduction) -> None:
        for parameter in reduction.forward.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = flow.zeros_like(parameter)
        reduce(reduction)

    reduce = FlatReduction.reduce
    with (
        mock.patch.object(FlatReduction, "reduce", keep_zeros),
        mock.patch.object(OneFlowDDP, "reduce", lambda self: None),
    ):
        yield


def _same_masks() -> AbstractContextManager[Any]:
    opened = inputs.random_context
    return mock.patch.object(inputs, "random_context", lambda key, rank: opened(key, 0))


@contextmanager
def _statistics_of_one_rank() -> Iterator[None]:
    with (
        mock.patch.object(eager, "share_batch_statistics", lambda layers: None),
        mock.patch.object(trainer_module, "share_batch_statistics", lambda layers: None),
    ):
        yield


def _faults() -> dict[str, Planned]:
    whole = Case(ADAMW)
    summed = Case(MOMENTUM, max_norm=None)  # AdamW and clipping hide the size of a gradient
    not_reduced = partial(mock.patch.object, FlatReduction, "reduce", lambda self: None)
    sum_of_ranks = partial(mock.patch.object, data_parallel, "get_world_size", lambda: 1)
    means = {"model": MeanOfMeans}
    unused, statistics = VARIANTS["unused_adamw"], VARIANTS["batch_norm"]
    return {
        "mean of the ranks' means, eager": Planned(whole, trained_case=whole.with_(**means)),
        "zeros for unreached parameters, eager": Planned(unused, fault=_zeros_for_unreached),
        "zeros for unreached parameters, ddp": Planned(unused, fault=_zeros_for_unreached),
        "gradients that are not reduced, eager": Planned(whole, fault=not_reduced),
        "sum of the ranks in place of the mean, eager": Planned(summed, fault=sum_of_ranks),
        "batch statistics of one rank, eager": Planned(statistics, fault=_statistics_of_one_rank),
        "batch statistics of one rank, graph": Planned(statistics, fault=_statistics_of_one_rank),
        "dropout masks that repeat, eager": Planned(VARIANTS["dropout"], fault=_same_masks),
    }


FAULTS = _faults()


def is_detected(plan: Planned, mode: str) -> bool:
    """Return whether the comparison detects a fault, or the library on every rank. Collective.

    Without the rehearsal, which would detect the wrong training and use global tensors instead.
    """
    try:
        with mock.patch.object(trainers, "make_reference", lambda _: ([], None)):
            return not trained_on_ranks(plan, mode)[0].is_rounding(plan.case, MESH_LOSS_BOUND)
    except UserError:
        return True


@on_ranks(2, FAULTS)
def a_planted_fault_is_detected(name: str) -> None:
    assert is_detected(FAULTS[name], name.rpartition(", ")[2]), "nothing differs"


# ----------------------------------------------------------------------------------------------
# every kind of mesh


def _with_adapters() -> PlainModel:
    """Adapters of layers that a plan splits on either axis, and of one that it does not."""
    model = PlainModel(tied=False)
    add_lora(model, ["query", "up", "down", "head"], rank=3, alpha=6.0, dropout=0.1)
    return model


def _split_head() -> dict[str, Any]:
    return {"split": {"head.*": 0}}


FAMILIES = {**VISION, **TEXT}
_FAMILY_ROWS = [(name, kind, mode) for name in FAMILIES for kind in MESHES for mode in MODES]
#: each plan on tensor-parallel ranks and on pipeline stages, and data-parallel ranks, which do not
#: depend on the model, in each mode
_DAILY_FAMILIES = daily_rows([row for row in _FAMILY_ROWS if row[1] != "data"])
_DAILY_FAMILIES += [("gpt", "data", "graph"), ("resmlp", "data", "eager")]


@on_ranks(2, map(", ".join, _FAMILY_ROWS), list(map(", ".join, _DAILY_FAMILIES)))
def a_family_trains_on_every_kind_of_mesh(key: str) -> None:
    """With several micro-batches for pipeline stages, and every second family with ZeRO."""
    name, kind, mode = key.split(", ")
    case = FAMILIES[name]
    if kind == "pipeline" and name in TEXT:
        case = case.with_(accumulation=2)
    is_sharded = kind == "data" and list(FAMILIES).index(name) % 2
    check_plan(Planned(case, MESHES[kind], {"zero_stage": 2} if is_sharded else {}), mode)


def _of_two_ranks() -> dict[str, Planned]:
    data, tensor, pipeline = MESHES.values()
    noisy = plain(dropout=0.2, source_ops=True).with_(max_norm=CLIPPED)
    adapted = plain(tied=False).with_(model=_with_adapters, max_norm=CLIPPED, cut_by="micro-batch")
    resnet, synchronized = IMAGES["resnet"], IMAGES["synchronized"]
    evaluated = partial(Planned, evaluates=True)
    return {
        "plain on data": evaluated(plain(), data),
        "dropout and source operations on tensor": evaluated(noisy, tensor),
        "plain on pipeline": evaluated(plain().with_(accumulation=2), pipeline),
        "resnet on pipeline": evaluated(resnet, pipeline),
        "resnet on tensor": evaluated(resnet.with_(plan=_split_head()), tensor),
        "synchronized on data": evaluated(synchronized, data),
        "synchronized on pipeline": evaluated(synchronized.with_(accumulation=2), pipeline),
        "synchronized with ZeRO": Planned(synchronized, data, {"zero_stage": 2}),
        **{f"adapters on {kind}": Planned(adapted, mesh) for kind, mesh in MESHES.items()},
    }


def _of_four_ranks() -> dict[str, Planned]:
    untied = plain(tied=False).with_(max_norm=CLIPPED)
    dropped = plain(dropout=0.1).with_(max_norm=CLIPPED)
    last = untied.with_(accumulation=2, plan={**PlainModel.plan, "last": families.LAST})
    return {
        "data x tensor": Planned(dropped, (2, 2, 1), evaluates=True),
        "data x pipeline": Planned(last, (2, 1, 2), evaluates=True),
        "tensor x pipeline": Planned(plain(), (1, 2, 2), evaluates=True),
        "data": Planned(plain().with_(max_norm=CLIPPED), (4, 1, 1)),
        "synchronized on data x pipeline": Planned(IMAGES["synchronized"], (2, 1, 2)),
        "ZeRO x tensor": Planned(TEXT["gpt"], (2, 2, 1), {"zero_stage": 3}),
    }


def _of_eight_ranks() -> dict[str, Planned]:
    case = plain(tied=False).with_(
        max_norm=CLIPPED, plan={**PlainModel.plan, "last": families.LAST}
    )
    return {"data x tensor x pipeline": Planned(case, (2, 2, 2))}


PLANNED = {2: _of_two_ranks(), 4: _of_four_ranks(), 8: _of_eight_ranks()}


def _mesh_cells(ranks: int) -> Any:
    """Return a decorator that registers the cases of a number of ranks in both modes."""
    rows = [(name, mode) for name in PLANNED[ranks] for mode in MODES]
    daily = daily_rows(rows, together=1) if ranks < 8 else []
    return on_ranks(ranks, map(", ".join, rows), list(map(", ".join, daily)))


@_mesh_cells(2)
@_mesh_cells(4)
@_mesh_cells(8)
def trains_on_a_mesh(key: str) -> None:
    name, mode = key.split(", ")
    world = flow.env.get_world_size()
    trainer = check_plan(PLANNED[world][name], mode)
    if name == "ZeRO x tensor":  # small vectors are halved and not quartered
        held = trainer.layout.sharding
        assert held is not None and held.shares_parameters


@on_ranks(2)
def auto_parallel_trains_as_one_process_does(_: str) -> None:
    check_plan(Planned(plain(), options={"auto_parallel": True}), "graph")


# ----------------------------------------------------------------------------------------------
# evaluation and prediction


def _compare_evaluation(plan: Planned, trainer: Any, tensors: Mapping[str, np.ndarray]) -> None:
    """Compare metrics and predicted logits of samples that training has not seen with those of one
    process. Collective.
    """
    mesh = trainer.mesh
    samples = {name: array[:EVAL_SAMPLES] for name, array in plan.case.batches()[-1].items()}
    inputs = {name: array for name, array in samples.items() if name != "labels"}
    mine = slice(2 * mesh.data_rank, 2 * mesh.data_rank + 2)
    loader = build_eval_loader(
        samples, micro_batch_size=2, data_rank=mesh.data_rank, num_data_ranks=mesh.data
    )
    evaluator = ClassificationEvaluator(topk=(1, 2), ignore_index=-100)
    metrics = trainer.evaluate(loader, {"top": evaluator})
    logits = trainer.predict({name: array[mine] for name, array in inputs.items()})["logits"]

    model, _, _ = plan.case.build()
    load_weights({name: tensors[name] for name in model.state_dict()}, model)
    model.eval()
    with flow.no_grad():
        expected = model(**{name: flow.from_numpy(array) for name, array in inputs.items()})
    sums = evaluator.process({"labels": flow.from_numpy(samples["labels"])}, expected)
    wanted = {f"eval/val/{name}": value for name, value in evaluator.compute(sums).items()}
    assert metrics == wanted, (metrics, wanted)
    apart = np.abs(logits.numpy() - expected["logits"].numpy()[mine]).max()
    assert apart <= LOGIT_BOUND, apart
