"""The clip norm of a compiled graph equals the eager one, which OneFlow's own does not."""

import math

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from libai.oneflow_fixes.job.clip import make_clip_norm_exact
from libai.oneflow_fixes.job.job_edit import JobEdit

_RNG = np.random.RandomState(0)


class Linear(nn.Module):
    """Its gradients are the given arrays."""

    def __init__(self, gradients):
        super().__init__()
        for index, gradient in enumerate(gradients):
            setattr(self, f"weight{index}", nn.Parameter(flow.zeros(*gradient.shape)))
            self.register_buffer(f"gradient{index}", flow.tensor(gradient))
        self.num = len(gradients)

    def forward(self):
        return sum((getattr(self, f"weight{i}") * getattr(self, f"gradient{i}")).sum() for i in range(self.num))


class ClippingGraph(nn.Graph):
    def __init__(self, model, norm_type, is_exact):
        super().__init__()
        self.model = model
        self.is_exact = is_exact
        self.num_rewritten = None
        group = {"params": list(model.parameters()), "clip_grad_max_norm": 0.5, "clip_grad_norm_type": norm_type}
        self.add_optimizer(flow.optim.SGD([group], lr=1.0))

    def build(self):
        loss = self.model()
        loss.backward()
        return loss

    def _Graph__rebuild_outputs(self, out2name=None):
        if self.is_exact:
            with JobEdit(self._full_job_proto) as job:
                self.num_rewritten = make_clip_norm_exact(job)
        super()._Graph__rebuild_outputs(out2name)


def clipped_by_graph(gradients, norm_type=2.0, is_exact=True):
    """(the gradients that the update used, gradients rewritten)"""
    model = Linear(gradients)
    graph = ClippingGraph(model, norm_type, is_exact)
    graph()
    return [-parameter.numpy() for parameter in model.parameters()], graph.num_rewritten


def relative_error(gradients, norm_type, **options):
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in gradients]).astype("float64"), norm_type)
    used, num_rewritten = clipped_by_graph(gradients, norm_type, **options)
    ratio = np.vdot(used[0], gradients[0]) / np.vdot(gradients[0].astype("float64"), gradients[0]) * norm / 0.5
    return abs(ratio - 1.0), num_rewritten


def small_gradients():
    return [_RNG.randn(*shape).astype("float32") for shape in ((8, 4), (5,), (2, 3, 2))]


def large_gradients():
    return [_RNG.randn(256, 512).astype("float32") for _ in range(8)]


@pytest.mark.parametrize(("norm_type", "expected"), [(1.0, 3), (2.0, 3), (3.0, 0), (math.inf, 0)])
def test_every_norm_is_right_on_small_gradients(norm_type, expected, kernels_off):
    gradients = small_gradients()
    error, num_rewritten = relative_error(gradients, norm_type)
    assert error < 2e-6
    assert num_rewritten == expected


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_our_kernels_need_no_other_operations(norm_type, library):
    for gradients in (small_gradients(), large_gradients()):
        error, num_rewritten = relative_error(gradients, norm_type)
        assert error < 2e-6
        assert num_rewritten == 0


def test_many_and_large_gradients_are_summed_exactly(kernels_off):
    gradients = large_gradients()
    assert relative_error(gradients, 2.0)[0] < 1e-6
    # negative control, and the reason for the rewriting: OneFlow's own sum
    assert relative_error(gradients, 2.0, is_exact=False)[0] > 1e-5
