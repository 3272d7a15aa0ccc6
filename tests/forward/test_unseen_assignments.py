"""Assignments that OneFlow's backward pass does not see are refused before the first update, in both modes."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.utils.errors import UserError


class Assigns(nn.Module):
    """Two features are overwritten through a list of indices: in every sample, or in the samples named one by one."""

    def __init__(self, is_seen, counts=False):
        super().__init__()
        self.layer, self.is_seen = nn.Linear(3, 3), is_seen
        if counts:
            self.register_buffer("count", flow.zeros(1))

    def forward(self, x):
        if hasattr(self, "count"):
            self.count += 1
        h = self.layer(x) * 1.0
        columns = flow.tensor([0, 2])
        if self.is_seen:
            h[flow.arange(2), columns] = 0.5
        else:
            h[:, columns] = 0.5
        return {"losses": {"mse": h.pow(2).mean()}}


@pytest.mark.parametrize("counts", [False, True])
def test_it_is_refused_with_the_line_to_write(mode, counts):
    """Also where a buffer changes, for which methods of tensors are replaced while forward runs."""
    model, batch = Assigns(is_seen=False, counts=counts), {"x": np.ones((2, 3), np.float32)}
    with pytest.raises(
        UserError, match=r"test_unseen_assignments.py:\d+ changes .*as if the line were not there. Compute a new tensor"
    ):
        toy.trainer_of(mode, model, [batch], flow.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)


def test_an_assignment_that_is_seen_trains_in_eager_mode():
    model, batch = Assigns(is_seen=True), {"x": np.ones((2, 3), np.float32)}
    toy.trainer_of("eager", model, [batch], flow.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)


def test_oneflow_itself_computes_another_gradient(monkeypatch):
    """Negative control: two of three features are constants, and their biases have a gradient all the same."""
    monkeypatch.setattr(
        flow.Tensor, "__setitem__", getattr(flow.Tensor.__setitem__, "__wrapped__", flow.Tensor.__setitem__)
    )
    model = Assigns(is_seen=False)
    model(flow.ones(2, 3))["losses"]["mse"].backward()
    assert np.count_nonzero(model.layer.bias.grad.numpy()) == 3
