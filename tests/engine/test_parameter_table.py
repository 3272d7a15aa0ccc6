"""The table of a model's parameters: numbered modules share their rows."""

import oneflow as flow
from oneflow import nn

from libai.engine.run.report import parameter_table


class Tied(nn.Module):
    """Has a parameter outside of layers, equal blocks, a frozen layer and a weight that is used
    twice.
    """

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(flow.ones(4))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.frozen = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.head.weight


def test_numbered_modules_share_rows_and_frozen_parameters_are_marked():
    rows = [line.split() for line in parameter_table(Tied())]
    assert rows == [
        ["parameter", "tensors", "shape", "elements", "trained"],
        ["scale", "1", "4", "4", "yes"],
        ["blocks.*.*.weight", "3", "4x4", "48", "yes"],
        ["blocks.*.*.bias", "3", "4", "12", "yes"],
        ["frozen.weight", "1", "2x4", "8", "frozen"],
        ["frozen.bias", "1", "2", "2", "frozen"],
        ["head.weight", "1", "4x4", "16", "yes"],
    ]
