"""Both modes add the gradients of a tensor with many readers in the same order, so that their bits
are equal.

test_equivalence.py compares the bits of its cases. Here each mechanism is switched off in turn, and
the bits must differ.
"""

import contextlib

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from parity_cases import OPTIMIZERS, TRAINERS, Case, different_tensors, trained

from libai.native import kernels

needs_kernels = pytest.mark.skipif(
    not kernels.are_kernels_on(), reason="contiguous copies need libai's kernels"
)


class ManyReaders(nn.Module):
    """A hidden tensor with one strided reader, and with three others whose gradients arrive one
    after another.
    """

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.across = nn.Linear(5, 5)
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        h = self.enter(x)
        outputs = self.across(h.transpose(1, 2)).transpose(1, 2)
        for length in (1, 2, 3):
            reader = h
            for _ in range(length):
                reader = flow.tanh(reader * 1.1)
            outputs = outputs + reader
        return {"losses": {"loss": ((self.head(outputs) - y) ** 2).mean()}}


def batches():
    random = np.random.RandomState(0)
    shapes = {"x": (16, 5, 6), "y": (16, 5, 4)}
    return [
        {name: random.randn(*shape).astype("float32") for name, shape in shapes.items()}
        for _ in range(4)
    ]


CASE = Case(OPTIMIZERS["adam"], ManyReaders, batches)


@contextlib.contextmanager
def keeping_nodes():
    """Give the copies of strided tensors a node in the autograd graph, as OneFlow does."""
    keep = kernels.loaded_library()._library.libai_contiguous_keeps_node
    keep(True)
    try:
        yield
    finally:
        keep(False)


def differing_bits():
    eager, graph = (trained(CASE, mode, rehearse=0) for mode in TRAINERS)
    return different_tensors(eager, graph)


@needs_kernels
def test_a_tensor_with_many_readers_has_the_same_gradient_in_both_modes():
    assert differing_bits() == []


@needs_kernels
def test_without_ordered_sums_the_bits_differ(monkeypatch):
    monkeypatch.setenv("LIBAI_PATCHES", "-ordered-sums")
    assert differing_bits() != []


@needs_kernels
def test_with_nodes_for_contiguous_copies_the_bits_differ():
    with keeping_nodes():
        assert differing_bits() != []


@needs_kernels
def test_a_hook_on_a_contiguous_copy_sees_only_the_gradient_of_the_copy():
    x = flow.ones(2, 3, requires_grad=True)
    turned = (x * 1).transpose(0, 1)
    copy = turned.contiguous()
    copy.register_hook(lambda gradient: gradient * 10)
    (copy.sum() + turned.sum()).backward()
    assert (x.grad.numpy() == 11).all()
