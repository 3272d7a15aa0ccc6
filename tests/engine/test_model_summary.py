"""The summary of a model: outputs, parameters, FLOPs and memory of every module, for any module and batch."""

from __future__ import annotations

import json

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.cli.commands import summary as command
from libai.engine.graph.build_errors import GraphBuildError
from libai.engine.setup.shape_only import build_shape_only, trace_forward
from libai.engine.setup.summary import summarize
from libai.models import GPT, MLP
from libai.parallel import Mesh, ParallelPlan
from libai.parallel.planner.activations import stage_costs
from libai.utils.errors import UserError


class Pair(nn.Module):
    """Takes two tensors and returns a tuple; one layer is frozen, one runs twice, one never."""

    def __init__(self):
        super().__init__()
        self.frozen, self.twice, self.never = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, a, b):
        h = self.twice(flow.relu(self.twice(self.frozen(a)))) + b
        return h, (h.sum(), b)


A, B = np.zeros((4, 6), np.float32), np.ones((4, 6), np.float32)


@pytest.mark.parametrize("batch", [(A, B), [flow.tensor(A), flow.tensor(B)], {"b": B, "a": A}])
def test_any_module_with_a_dict_or_a_tuple(batch):
    model = Pair()
    classes = [type(module) for module in model.modules()]
    found = summarize(model, batch, flow.optim.AdamW(model.parameters(), lr=0.1))
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["", "frozen", "twice", "never"]
    assert rows[""].output == ((4, 6), (), (4, 6)) and rows["never"].output == ()
    assert [row.kind for row in found.rows] == ["Pair", "Linear", "Linear", "Linear"]
    assert [row.parameters for row in found.rows] == [84, 42, 36, 6]
    assert [row.trained for row in found.rows] == [42, 0, 36, 6]
    assert [row.flops for row in found.rows] == [3 * 2 * 4 * 36, 2 * 4 * 36, 2 * 2 * 4 * 36, 0]
    assert [row.gradients for row in found.rows] == [4 * row.trained for row in found.rows]
    assert [row.optimizer for row in found.rows] == [8 * row.trained for row in found.rows]
    assert [type(module) for module in model.modules()] == classes
    assert all(p.grad is None for p in model.parameters())


def test_memory_is_that_of_the_planner_and_adds_up():
    """Tied weights count once; a block has what is below it. The model is large and takes no memory here."""
    model = build_shape_only(lambda: GPT(50000, 128, 2048, num_layers=2, num_heads=8))
    ids = np.zeros((2, 128), np.int64)
    found = summarize(
        model, {"input_ids": ids, "labels": ids}, flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    rows = {row.name: row for row in found.rows}
    assert rows[""].weights == 4 * rows[""].parameters == 4 * sum(p.numel() for p in model.parameters())
    assert rows[""].optimizer == rows[""].weights
    traced = trace_forward(model, {"input_ids": flow.tensor(ids), "labels": flow.tensor(ids)})
    (cost,) = stage_costs(traced, ParallelPlan.of(model).arrange(model, Mesh()))
    assert rows[""].activations == cost.kept
    assert rows["blocks"].activations == rows["blocks.0"].activations + rows["blocks.1"].activations
    assert rows["blocks"].flops == rows["blocks.0"].flops + rows["blocks.1"].flops


@pytest.mark.parametrize("memory", [False, True])
def test_the_table_fits_a_screen(memory):
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 7), nn.Sequential(nn.ReLU())), nn.Linear(7, 2**20))
    found = summarize(model, [np.zeros((16, 8), np.float32)])
    table = found.table(memory=memory)
    assert len(table.splitlines()) == 7 and max(map(len, table.splitlines())) <= 80
    assert [len(found.table(depth=depth).splitlines()) for depth in (1, 2, 3)] == [4, 6, 7]


class Extended(MLP):
    """Needs what tracing adds to OneFlow's: `super()` in a forward."""

    def forward(self, images, labels=None):
        return super().forward(images * 2.0, labels)


def test_a_forward_is_traced_as_graph_mode_traces_it():
    assert summarize(Extended(6, [5], 2), [A]).rows[0].flops == 2 * 4 * (6 * 5 + 5 * 2)


class Reads(MLP):
    """Cannot be traced."""

    def forward(self, images, labels=None):
        return super().forward(images * float(images.sum()), labels)


def test_what_cannot_be_traced_is_told(capsys):
    with pytest.raises(
        GraphBuildError, match=r"Reads could not be compiled.*float\(images.sum\(\)\).*: it reads the value"
    ):
        summarize(Reads(6, [5], 2), [A])
    assert capsys.readouterr().out == ""  # OneFlow says it in its own words there
    with pytest.raises(UserError, match=r"3 items, but Pair.forward takes 2"):
        summarize(Pair(), (A, B, A))


def test_an_optimizer_of_the_user_has_an_unknown_state():
    class Own(flow.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

    model = toy.Classifier()
    found = summarize(model, {"x": np.zeros((2, 8), np.float32), "y": np.zeros(2, np.int64)}, Own(model.parameters()))
    assert found.rows[0].optimizer is None and "?" in found.table(memory=True)


def test_the_command_leaves_out_what_only_a_trace_tells(capsys):
    words = ["configs/mlp_digits.py", f"model._target_={__name__}.Reads"]
    assert command.run(words) == 0
    shown = capsys.readouterr()
    assert " trained; batch of" in shown.out and "?" in shown.out and "FLOPs a" not in shown.out
    (note,) = [line for line in shown.err.splitlines() if "no outputs, FLOPs and activations" in line]
    assert "it reads the value of a tensor" in note
    assert command.run([*words, "--memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["activations"] is None


def test_the_command(capsys):
    assert command.run(["configs/mlp_digits.py", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert command.run(["configs/mlp_digits.py", "--depth", "1"]) == 0
    text = capsys.readouterr().out
    assert rows[0]["kind"] == "MLP" and f"{rows[0]['parameters']:,} parameters" in text
    assert command.run(["configs/mlp_digits.py", "--memory"]) == 0
    assert "activations" in capsys.readouterr().out
    with pytest.raises(UserError, match="--depth 0: it must be at least 1"):
        command.run(["configs/mlp_digits.py", "--depth", "0"])
