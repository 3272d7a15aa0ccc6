"""Assignments that OneFlow's backward pass ignores are refused before the first update, in both modes."""

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.utils.errors import UserError


class Assigns(nn.Module):
    """Overwrites two features through a list of indices, either in every sample or in listed samples."""

    def __init__(self, is_seen):
        super().__init__()
        self.layer, self.is_seen = nn.Linear(3, 3), is_seen

    def forward(self, x):
        h = self.layer(x) * 1.0
        columns = flow.tensor([0, 2])
        if self.is_seen:
            h[flow.arange(2), columns] = 0.5
        else:
            h[:, columns] = 0.5
        return {"losses": {"mse": h.pow(2).mean()}}


def test_an_unseen_assignment_is_refused_with_a_remedy(mode):
    model, batch = Assigns(is_seen=False), {"x": np.ones((2, 3), np.float32)}
    with pytest.raises(
        UserError, match=r"test_unseen_assignments.py:\d+ changes .*as if the line did not exist. Compute a new tensor"
    ):
        toy.trainer_of(mode, model, [batch], flow.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)


def test_an_assignment_that_is_seen_trains_in_eager_mode():
    model, batch = Assigns(is_seen=True), {"x": np.ones((2, 3), np.float32)}
    toy.trainer_of("eager", model, [batch], flow.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)
