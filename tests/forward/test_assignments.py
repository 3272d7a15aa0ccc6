"""Assignments to indices and masks, which OneFlow 0.9.0 cannot compile, or whose gradient it
ignores.
"""

import oneflow as flow
import pytest
from oneflow import nn

from libai.patches.global_tensors import repair_assignments


@pytest.fixture(autouse=True)
def _repaired():
    repair_assignments()


def test_replaced_columns_have_no_gradient_and_their_values_have_one():
    x, value = flow.ones(2, 3, requires_grad=True), flow.ones(2, requires_grad=True)
    h = x * 2.0
    h[:, [0, 2]] = value
    (h * h).sum().backward()
    assert x.grad.numpy().tolist() == [[0.0, 8.0, 0.0]] * 2
    assert value.grad.numpy().tolist() == [4.0, 4.0]


def replaced(x: flow.Tensor, number) -> flow.Tensor:
    x = x.clone()
    x[:, [0, 2]] = number
    x[flow.tensor([2, -1])] = number
    x[flow.tensor([True, False, False, False])] = number
    return x


@pytest.mark.parametrize(
    "kind, number", [("bool", True), ("int32", -100), ("int64", 0.5), ("float64", 2)]
)
def test_a_graph_assigns_numbers_as_eager_mode_does(kind, number):
    class Assigning(nn.Graph):
        def build(self, x):
            return replaced(x, number)

    x = flow.zeros(4, 3, dtype=getattr(flow, kind))
    eager, compiled = replaced(x, number), Assigning()(x)
    assert compiled.dtype == eager.dtype == x.dtype
    assert compiled.numpy().tolist() == eager.numpy().tolist()
