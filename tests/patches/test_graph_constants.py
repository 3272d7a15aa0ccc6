"""Chains of operations that compute a constant become one operation, and no number changes."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.patches.job import passes

pytestmark = pytest.mark.e2e


class TwoLosses(toy.Classifier):
    """Means over different shapes, one of them a metric as well."""

    def forward(self, x, y):
        hidden = flow.relu(self.a(x))
        small = hidden.abs().mean() * 0.1
        losses = {"cls": nn.functional.cross_entropy(self.b(hidden), y), "small": small}
        return {"losses": losses, "metrics": {"size": small.detach()}}


class LossIsOnes(toy.Classifier):
    """The gradient of its loss is a constant that reaches the parameters as it is."""

    def forward(self, x, y):
        return {"losses": {"sum": self.b.bias.sum() * 3.0 + self.a(x).sum() * 0.0}}


def train(model, accumulation=1, **options):
    flow.manual_seed(0)
    net = model()
    trainer = toy.trainer_of(
        "graph", net, toy.batches(6), toy.optimizer_of("adamw", net), num_accumulation_steps=accumulation, **options
    )
    losses = toy.record_losses(trainer)
    trainer.train(0, 6 // accumulation)
    kinds = [graphs_kind(op) for op in trainer.graph._full_job_proto.net.op]
    return losses, [p.numpy().copy() for p in net.parameters()], kinds


def graphs_kind(op):
    return op.user_conf.op_type_name if op.HasField("user_conf") else op.WhichOneof("op_type")


@pytest.mark.parametrize(
    "model, options, fewer",
    [
        (toy.MeanLoss, {}, 2),
        (toy.MeanLoss, {"max_grad_norm": 0.5}, 2),
        (TwoLosses, {}, None),
        (LossIsOnes, {}, None),
    ],
)
def test_the_job_has_fewer_operations_and_the_same_numbers(model, options, fewer, monkeypatch):
    losses, weights, kinds = train(model, **options)
    monkeypatch.setattr(passes, "fold_constants", lambda job: 0)
    plain_losses, plain_weights, plain_kinds = train(model, **options)
    assert losses == plain_losses
    assert all(np.array_equal(a, b) for a, b in zip(weights, plain_weights))
    assert "constant" in kinds and "ones_like" not in kinds
    assert len(plain_kinds) - len(kinds) >= 1 if fewer is None else len(plain_kinds) - len(kinds) == fewer


def test_with_accumulation_the_operations_stay():
    assert {"ones_like", "broadcast_like"} <= set(train(toy.MeanLoss, accumulation=2)[2])
