"""ZeRO splits the expected axes of parameters (training: tests/dist/zero_ranks.py)."""

import logging

from oneflow import nn
from toy import losses_of, make_trainer

from libai.models import GPT
from libai.parallel import Mesh, ParallelPlan


def arranged(model, mesh, shares=True):
    return ParallelPlan.of(model).arrange(model, mesh, shares_parameters=shares)


def gpt():
    return GPT(64, 16, 16, 2, 2)


def test_every_parameter_is_cut_on_the_first_axis_that_divides():
    model = nn.ModuleDict({"even": nn.Linear(3, 4), "odd": nn.Linear(4, 3)})
    tensors = arranged(model, Mesh(data=2)).tensors
    assert {name: t.data_axis for name, t in tensors.items()} == {
        "even.weight": 0,
        "even.bias": 0,
        "odd.weight": 1,
        "odd.bias": None,
    }


def test_the_axis_of_tensor_parallelism_is_left_alone():
    tensors = arranged(gpt(), Mesh(data=2, tensor=2)).tensors
    column, row = tensors["blocks.0.mlp.up.weight"], tensors["blocks.0.mlp.down.weight"]
    assert (column.axis, column.data_axis) == (0, 1)
    assert (row.axis, row.data_axis) == (1, 0)
    assert tensors["blocks.0.mlp.up.bias"].data_axis is None  # its only axis is taken


def test_buffers_and_single_data_ranks_share_nothing():
    assert arranged(gpt(), Mesh(data=2)).tensors["blocks.0.attention.causal_mask"].data_axis is None
    assert not arranged(gpt(), Mesh(tensor=2)).shares_parameters
    assert not arranged(gpt(), Mesh(data=2), shares=False).shares_parameters


def test_one_rank_trains_as_without_and_is_told(caplog, monkeypatch):
    # after a run has set up libai's loggers, they do not pass their records to the root logger
    monkeypatch.setattr(logging.getLogger("libai"), "propagate", True)
    losses = []
    for stage in (0, 3):
        losses.append(losses_of(make_trainer("eager", zero_stage=stage), 3))
    assert losses[0] == losses[1]
    assert [r.message for r in caplog.records if "ZeRO (stage 3) saves no memory" in r.message]
