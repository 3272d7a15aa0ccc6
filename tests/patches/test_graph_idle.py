"""Operations that hand on what they get are taken out of a compiled step, and no number changes."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
import toy
from marks import slow_but
from oneflow import nn

from libai.models import GPT, MLP, ViT
from libai.patches.job import passes

pytestmark = pytest.mark.e2e


class ReshapedWeight(toy.Classifier):
    """Idle operations on a weight, on an input, and on what only an output reads."""

    def forward(self, x, y):
        hidden = flow.relu(
            flow._C.matmul(x.reshape(*x.shape), self.a.weight.reshape(*self.a.weight.shape), False, True)
        )
        losses = {"cls": nn.functional.cross_entropy(self.b(hidden), y)}
        return {"losses": losses, "metrics": {"size": hidden.detach().abs().mean().reshape(())}}


def images(count):
    rng = np.random.RandomState(0)
    return [{"images": rng.randn(8, 1, 8, 8).astype(np.float32), "labels": rng.randint(0, 10, 8)} for _ in range(count)]


def text(count):
    rng = np.random.RandomState(0)
    return [{"input_ids": rng.randint(0, 64, (4, 12)), "labels": rng.randint(0, 64, (4, 12))} for _ in range(count)]


CASES = {
    "weight": (ReshapedWeight, toy.batches),
    "mlp": (lambda: MLP(64, (32, 16), 10), images),
    "vit": (lambda: ViT(8, 4, 1, 10, 16, 1, 2), images),
    "gpt": (lambda: GPT(64, 12, 16, 1, 2, dropout=0.1), text),
}


def train(case, accumulation, **options):
    build, batches = CASES[case]
    flow.manual_seed(0)
    net = build()
    trainer = toy.trainer_of(
        "graph", net, batches(6), toy.optimizer_of("adamw", net), num_accumulation_steps=accumulation, **options
    )
    losses = toy.record_losses(trainer)
    trainer.train(0, 6 // accumulation)
    return losses, [p.numpy().copy() for p in net.parameters()], trainer.graph._full_job_proto


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("case", slow_but(CASES, "weight", "mlp"))
def test_the_job_has_fewer_operations_and_the_same_numbers(case, accumulation, monkeypatch):
    losses, weights, job = train(case, accumulation, max_grad_norm=0.5)
    monkeypatch.setattr(passes, "remove_idle_ops", lambda job: 0)
    plain_losses, plain_weights, plain_job = train(case, accumulation, max_grad_norm=0.5)
    assert losses == plain_losses
    assert all(np.array_equal(a, b) for a, b in zip(weights, plain_weights))
    assert len(plain_job.net.op) - len(job.net.op) >= 3
    for op in job.net.op:
        if op.HasField("user_conf") and op.user_conf.op_type_name == "reshape":
            described = job.helper.lbn2logical_blob_desc
            source, output = op.user_conf.input["in"].s[0], op.user_conf.output["out"].s[0]
            readers = [other for other in job.net.op if f"{op.name}/".encode() in other.SerializeToString()]
            changes = list(described[source].shape.dim) != list(described[output].shape.dim)
            assert changes or any(not reader.HasField("user_conf") for reader in readers if reader.name != op.name)
