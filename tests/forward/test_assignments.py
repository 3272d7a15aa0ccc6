"""Assignments to indices next to slices, whose gradients OneFlow 0.9.0's backward pass ignores."""

import oneflow as flow

from libai.patches.global_tensors import repair_assignments


def test_replaced_columns_have_no_gradient_and_their_values_have_one():
    repair_assignments()
    x, value = flow.ones(2, 3, requires_grad=True), flow.ones(2, requires_grad=True)
    h = x * 2.0
    h[:, [0, 2]] = value
    (h * h).sum().backward()
    assert x.grad.numpy().tolist() == [[0.0, 8.0, 0.0]] * 2
    assert value.grad.numpy().tolist() == [4.0, 4.0]
