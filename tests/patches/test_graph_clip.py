"""The clip norm of a compiled graph equals the eager norm, unlike the norm that OneFlow
computes.
"""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from toy import make_trainer

from libai.patches.job import passes
from libai.patches.job.job_edit import JobEdit

_RNG = np.random.RandomState(0)


class Linear(nn.Module):
    """A model with zero weights whose gradients are the given arrays."""

    def __init__(self, gradients):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(flow.zeros(*g.shape)) for g in gradients])
        self.num = len(gradients)

    def forward(self, **gradients):
        return sum((self.weights[i] * gradients[f"g{i}"]).sum() for i in range(self.num))


def relative_error(gradients):
    """Return the error of the norm by which an update clips, and the number of rewritten norms."""
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in gradients]).astype("float64"))
    batch = {f"g{i}": gradient for i, gradient in enumerate(gradients)}
    trainer = make_trainer(
        "graph",
        [batch],
        lambda: Linear(gradients),
        lambda model: flow.optim.SGD(model.parameters(), lr=1.0),
        max_grad_norm=0.5,
    )
    trainer.train(0, 1)
    used = -trainer.model.weights[0].numpy().astype("float64")
    ratio = np.vdot(used, gradients[0]) / np.vdot(gradients[0], gradients[0].astype("float64"))
    job = JobEdit(trainer.graph._full_job_proto)
    num_rewritten = sum(job.kind(op) == "square" for op in job.ops.values())
    return abs(ratio * norm / 0.5 - 1.0), num_rewritten


def small_gradients():
    return [_RNG.randn(*shape).astype("float32") for shape in ((8, 4), (5,), (2, 3, 2))]


def large_gradients():
    return [_RNG.randn(256, 512).astype("float32") for _ in range(8)]


def test_each_gradient_is_summed_exactly_by_itself(kernels_off):
    error, num_rewritten = relative_error(small_gradients())
    assert error < 2e-6
    assert num_rewritten == 3


@pytest.mark.parametrize("gradients", [small_gradients, large_gradients])
def test_our_kernels_need_no_other_operations(gradients, library):
    error, num_rewritten = relative_error(gradients())
    assert error < 2e-6
    assert num_rewritten == 0


def test_many_and_large_gradients_are_summed_exactly(kernels_off, monkeypatch):
    gradients = large_gradients()
    assert relative_error(gradients)[0] < 1e-6
    # negative control, and the reason for rewriting the norm: OneFlow's own sum is inexact
    monkeypatch.setattr(passes, "make_clip_norm_exact", lambda job: None)
    assert relative_error(gradients)[0] > 1e-5
