"""The table of a model's parameters: every module with its shapes, folded until it fits a screen."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from libai.engine.run.parameter_table import MOST_ROWS, parameter_table


class Tied(nn.Module):
    """A parameter of its own beside layers, blocks that are equal, a frozen layer and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(flow.ones(4))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.frozen = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.head.weight


def test_modules_parameters_and_what_is_trained():
    rows = [line.split() for line in parameter_table(Tied())]
    assert rows == [
        ["module", "kind", "shape", "parameters", "trained"],
        ["model", "Tied", "4", "90", "80"],
        ["blocks", "ModuleList", "60", "all"],
        ["blocks.*", "3", "x", "Sequential", "20", "all"],
        ["blocks.*.*", "3", "x", "Linear", "4x4", "+", "4", "20", "all"],
        ["frozen", "Linear", "2x4", "+", "2", "10", "frozen"],
        ["head", "Linear", "4x4", "16", "all"],
        ["again", "Linear", "4x4", "16", "all"],
    ]


def test_levels_are_left_out_until_it_fits_a_screen():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(size, 1), nn.Linear(1, size)) for size in range(1, 20)))
    lines = parameter_table(model)
    assert len(lines) == 1 + 1 + 19 <= MOST_ROWS
    assert lines[1].split() == ["model", "Sequential", f"{sum(3 * size + 1 for size in range(1, 20)):,}", "all"]


def test_a_model_without_parameters_is_one_row():
    (row,) = parameter_table(nn.ReLU())[1:]
    assert row.split() == ["model", "ReLU", "0", "all"]
