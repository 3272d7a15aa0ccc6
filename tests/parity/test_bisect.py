"""`find_culprit` names the pass over the compiled job, or the module, that makes the modes part."""

from __future__ import annotations

import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.engine import graphs
from libai.engine.parity import on_bench
from libai.engine.parity_bisect import find_culprit
from libai.layers.cpu import is_tracing


class Net(toy.Classifier):
    def __init__(self, middle):
        super().__init__()
        self.middle = middle

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(self.middle(flow.relu(self.a(x)))), y)}}


def culprit(build_model=toy.Classifier):
    return on_bench(
        find_culprit,
        build_model,
        toy.batches(4),
        lambda model: toy.optimizer_of("adamw", model),
        num_iters=2,
        max_grad_norm=0.1,
        device="cpu",
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "make_clip_norm_exact",
        pytest.param("remove_step_count", marks=SLOW),
        pytest.param("remove_idle_ops", marks=SLOW),
        pytest.param("fold_constants", marks=SLOW),
    ],
)
def test_a_wrong_pass_is_named(name, monkeypatch):
    """The pass also writes other options into the updates."""
    original = getattr(graphs, name)

    def wrong(job, *rest):
        result = original(job, *rest)
        for op in job.net.op:
            if op.HasField("user_conf") and "learning_rate" in op.user_conf.input and "model" in op.user_conf.input:
                op.user_conf.attr["l2"].at_float = 0.5
                op.user_conf.attr["beta1"].at_float = 0.5
        return result

    monkeypatch.setattr(graphs, name, wrong)
    found = culprit()
    assert (found.kind, found.names) == ("pass", (name,)), found


class Twice(nn.Module):
    def forward(self, x):
        return x * 2 if is_tracing() else x


class Detached(nn.Module):
    def forward(self, x):
        return x.detach() if is_tracing() else x


@pytest.mark.parametrize("layer", [Twice, pytest.param(Detached, marks=SLOW)])
def test_a_wrong_operation_or_backward_is_named_by_its_module(layer):
    found = culprit(lambda: Net(layer()))
    assert (found.kind, found.names) == ("module", ("middle",)), found


def test_equal_curves_have_no_culprit():
    assert culprit().kind == "none"
