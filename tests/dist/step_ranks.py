"""Cells about single steps: reduced and joined gradients, and changes that hooks make between
steps.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import oneflow as flow
import test_guards
from cells import on_ranks
from families import CLIPPED, plain
from numpy.testing import assert_allclose
from oneflow import nn
from parity_cases import build_trainer, run
from seam_ranks import check_refused, weights

from libai.parallel import Mesh, ParallelPlan, parallelize
from libai.parallel.data_parallel import FlatReduction, require_equal_modules
from libai.patches.job import passes
from libai.patches.job.gradients import edges_of_gradients
from libai.patches.job.job_edit import JobEdit
from libai.utils.distributed import (
    all_reduce,
    any_rank,
    broadcast_object,
    gather_objects,
    get_rank,
)
from libai.utils.seeding import resolve_seed

# ----------------------------------------------------------------------------------------------
# values


@on_ranks(2)
def values_are_added_and_sent_exactly(_: str) -> None:
    rank = get_rank()
    big = 2**53 + 1  # no float64
    assert all_reduce(np.array([[0.1 + rank], [1.0]])).tolist() == [[0.1 + 1.1], [2.0]]
    assert all_reduce(np.array([big, rank])).tolist() == [2 * big, 1]
    small = np.float32(1e-9)  # a sum in float32 would lose it
    assert all_reduce(np.array(small if rank else 1, np.float32)) == 1.0 + float(small)
    assert all_reduce(np.empty((0, 3))).shape == (0, 3)
    assert broadcast_object({"rank": rank, "text": "é"}) == {"rank": 0, "text": "é"}
    assert gather_objects([rank] * (1 + 5 * rank)) == [[0], [1] * 6]
    assert any_rank(rank == 1) and not any_rank(False)
    first, second = gather_objects(resolve_seed(None))
    assert first == second


SENT_BY = {"0": broadcast_object, "1": gather_objects}


@on_ranks(2, SENT_BY)
def an_object_that_is_not_json_fails_on_every_rank_alike(sender: str) -> None:
    """If only one rank raised an error, the other would wait forever."""
    is_sender = get_rank() == int(sender)
    try:
        SENT_BY[sender]({1, 2} if is_sender else 0)
    except TypeError as error:
        assert ("set" if is_sender else f"rank {sender} passed an object") in str(error), error
    else:
        raise AssertionError("sent")


# ----------------------------------------------------------------------------------------------
# reduction of eager gradients


def _ragged_model() -> nn.Module:
    """Return a model with parameters of two dtypes, a 0-dim and a frozen parameter, unequal on the
    ranks.
    """
    flow.manual_seed(get_rank())
    model = nn.Module()
    model.layer, model.rare = nn.Linear(4, 3), nn.Linear(2, 2)
    model.scale = nn.Parameter(flow.tensor(2.0 + get_rank()))
    model.wide = nn.Linear(3, 3).to(flow.float64)
    model.layer.bias.requires_grad_(False)
    return model


@on_ranks(2, ["64", str(2**20)])
def a_gradient_becomes_the_mean_of_those_that_ranks_have(bucket_bytes: str) -> None:
    """`rare` is reached by no rank, then only by rank 1. `layer.bias` is unfrozen on the way."""
    model = _ragged_model()
    reduction = FlatReduction(model, bucket_bytes=int(bucket_bytes))
    factor = get_rank() + 1
    for iteration in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        model.layer.bias.requires_grad_(iteration == 1)
        total = model.layer(flow.ones(2, 4) * factor).sum() * model.scale
        wide = model.wide(flow.ones(1, 3).to(flow.float64)).sum()
        total = total + wide.to(flow.float32) * factor
        if iteration == 1 and get_rank() == 1:
            total = total + model.rare(flow.ones(1, 2)).sum()
        total.backward()
        here = {
            n: np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy()
            for n, p in model.named_parameters()
        }
        reduction.reduce()
        for name, parameter in model.named_parameters():
            mean = all_reduce(here[name]) / 2
            is_unreached = iteration == 0 and name.startswith(("rare", "layer.bias"))
            assert (parameter.grad is None) == is_unreached, name
            if parameter.grad is not None:
                assert parameter.grad.dtype == parameter.dtype
                assert_allclose(parameter.grad.numpy(), mean, rtol=1e-6)


@on_ranks(2)
def unequal_models_are_refused_on_every_rank(_: str) -> None:
    require_equal_modules(nn.Linear(2, 3))
    mesh = Mesh.of_this_job("cpu")
    for model in (
        nn.Linear(2, 3 + get_rank()),
        nn.Sequential(*[nn.Linear(1, 1) for _ in range(1 + get_rank())]),
    ):
        text = "(?s)rank 0 has.*rank 1 has"
        check_refused(text, lambda model=model: parallelize(model, ParallelPlan(), mesh))


# ----------------------------------------------------------------------------------------------
# compiled gradients


def _compiled() -> tuple[Any, int]:
    """Return the result of a graph run and the number of its messages of gradients."""
    case = plain().with_(accumulation=2, max_norm=CLIPPED)
    trainer = build_trainer(case, "graph")
    result = run(trainer, 3)
    return result, len(edges_of_gradients(JobEdit(trainer.graph._full_job_proto)))


@on_ranks(2)
def joined_gradients_change_no_bit_and_save_messages(_: str) -> None:
    result, messages = _compiled()
    with mock.patch.object(passes, "join_gradients", lambda job: None):
        alone, messages_alone = _compiled()
    # two ranks: each sum is of two numbers, in whatever message, so that no bit may differ
    assert result.losses == alone.losses, (result.losses, alone.losses)
    for name, values in result.tensors.items():
        assert (values == alone.tensors[name]).all(), name
    assert messages == 1 < messages_alone, (messages, messages_alone)


# ----------------------------------------------------------------------------------------------
# changes between steps

#: changes that depend on the layout, and the optimizer
CHANGES = [
    "weight decay rises, adam",
    "frozen and trained again, adam",
    "the rate, adam",
    "new data of a parameter, adam",
    "loss switched, sgd",
    "number of a gradient hook, sgd",
    "a global, sgd",
    "a new buffer, sgd",
]


@on_ranks(2, CHANGES)
def a_change_of_a_hook_has_the_same_effect_in_both_modes(key: str) -> None:
    name, optimizer = key.split(", ")
    batches = test_guards.batches()[get_rank() :: 2] * 2  # other samples on each rank
    change, _ = test_guards.CHANGES[name]
    with mock.patch.object(test_guards, "batches", lambda: batches):
        eager, graph = (
            weights(test_guards.train(mode, optimizer, change)) for mode in ("eager", "graph")
        )
    assert_allclose(graph, eager, rtol=1e-6, atol=1e-7)
