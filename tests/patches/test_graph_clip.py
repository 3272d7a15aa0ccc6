"""The clip norm of a compiled graph equals the eager norm, unlike the norm that OneFlow
computes.
"""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from libai.patches.job.clip import make_clip_norm_exact
from libai.patches.job.job_edit import JobEdit

_RNG = np.random.RandomState(0)


class Linear(nn.Module):
    """A model with zero weights whose gradients are the given arrays."""

    def __init__(self, gradients):
        super().__init__()
        for index, gradient in enumerate(gradients):
            setattr(self, f"weight{index}", nn.Parameter(flow.zeros(*gradient.shape)))
            self.register_buffer(f"gradient{index}", flow.tensor(gradient))
        self.num = len(gradients)

    def forward(self):
        return sum(
            (getattr(self, f"weight{i}") * getattr(self, f"gradient{i}")).sum()
            for i in range(self.num)
        )


class ClippingGraph(nn.Graph):
    def __init__(self, model, is_exact):
        super().__init__()
        self.model = model
        self.is_exact = is_exact
        self.num_rewritten = None
        group = {
            "params": list(model.parameters()),
            "clip_grad_max_norm": 0.5,
            "clip_grad_norm_type": 2.0,
        }
        self.add_optimizer(flow.optim.SGD([group], lr=1.0))

    def build(self):
        loss = self.model()
        loss.backward()
        return loss

    def _Graph__rebuild_outputs(self, out2name=None):
        if self.is_exact:
            with JobEdit(self._full_job_proto) as job:
                make_clip_norm_exact(job)
                self.num_rewritten = sum(job.kind(op) == "square" for op in job.ops.values())
        super()._Graph__rebuild_outputs(out2name)


def clipped_by_graph(gradients, is_exact):
    """Return (gradients that the update used, number of gradients with rewritten norms)."""
    model = Linear(gradients)
    graph = ClippingGraph(model, is_exact)
    graph()
    return [-parameter.numpy() for parameter in model.parameters()], graph.num_rewritten


def relative_error(gradients, is_exact=True):
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in gradients]).astype("float64"))
    used, num_rewritten = clipped_by_graph(gradients, is_exact)
    ratio = (
        np.vdot(used[0], gradients[0])
        / np.vdot(gradients[0].astype("float64"), gradients[0])
        * norm
        / 0.5
    )
    return abs(ratio - 1.0), num_rewritten


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


def test_many_and_large_gradients_are_summed_exactly(kernels_off):
    gradients = large_gradients()
    assert relative_error(gradients)[0] < 1e-6
    # negative control, and the reason for rewriting the norm: OneFlow's own sum is inexact
    assert relative_error(gradients, is_exact=False)[0] > 1e-5
