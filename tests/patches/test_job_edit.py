"""The work of all passes over a compiled job is proportional to the number of its operations."""

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from toy import make_trainer

import libai
from libai.engine.compiled import graphs
from libai.patches.job import passes

pytestmark = pytest.mark.e2e

PACKAGE = str(Path(libai.__file__).parent)


class Deep(nn.Module):
    """Layers with operations that change nothing.

    Each layer adds a loss term with a constant gradient.
    """

    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(num_layers)])

    def forward(self, x):
        losses = {}
        for i, layer in enumerate(self.layers):
            x = flow.relu(layer(x).reshape(-1, 4))
            losses[f"mean_{i}"] = x.mean()
        return {"losses": losses}


def compiled(num_layers, **options):
    batch = {"x": np.ones((2, 4), np.float32)}
    trainer = make_trainer("graph", [batch], lambda: Deep(num_layers), **options)
    trainer.prepare()
    return trainer.graph


def steps_of_passes(num_layers, monkeypatch, **options):
    """Count the bytecode instructions that libai runs between OneFlow's completion and planning of
    a job.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    connect = graphs.TrainGraph._Graph__rebuild_outputs

    def traced(graph, out2name=None):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            connect(graph, out2name)
        finally:
            sys.settrace(before)

    with monkeypatch.context() as patch:
        patch.setattr(graphs.TrainGraph, "_Graph__rebuild_outputs", traced)
        compiled(num_layers, **options)
    return count


def growth(monkeypatch, **options):
    """Return 1 if the work grows by a constant per layer, or 2 if it grows with the square of the
    number of layers.
    """
    few, some, many = (steps_of_passes(n, monkeypatch, **options) for n in (2, 4, 8))
    return (many - some) / (some - few) / 2


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 1.0}, {"num_accumulation_steps": 2}], ids=str
)
def test_the_work_of_all_passes_is_linear_in_the_layers(options, monkeypatch):
    assert 0.9 < growth(monkeypatch, **options) < 1.1


def test_a_pass_that_looks_through_all_operations_for_each_would_be_noticed(monkeypatch):
    """Negative control: a planted pass does quadratic work."""
    monkeypatch.setattr(passes, "remove_step_count", _in_squares)
    assert growth(monkeypatch) > 1.5


def _in_squares(job):
    names = list(job.ops)
    code = compile(
        "sum(a == b for a in names for b in names for _ in range(3))",
        f"{PACKAGE}/planted.py",
        "eval",
    )
    return eval(code, {"names": names})
