"""Pipeline stages have similar numbers of parameters, and at least one block each."""

import pytest
from oneflow import nn

from libai.parallel import Mesh, ParallelPlan


class Model(nn.Module):
    """A model with the given numbers of parameters before, in and after its blocks."""

    def __init__(self, before, blocks, behind):
        super().__init__()
        self.embedding = nn.Linear(1, before, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(1, size, bias=False) for size in blocks])
        self.head = nn.Linear(1, behind, bias=False)


@pytest.mark.parametrize(
    "sizes, stages, counts",
    [
        ((1, [4] * 4, 1), 2, [2, 2]),
        ((8, [4] * 4, 1), 2, [1, 3]),
        ((1, [4] * 4, 8), 2, [3, 1]),
        ((1, [20, 4, 4, 4], 1), 2, [1, 3]),
        ((100, [4] * 3, 1), 3, [1, 1, 1]),
        ((1, [4] * 3, 100), 3, [1, 1, 1]),
        ((1, [4] * 6, 1), 3, [2, 2, 2]),
    ],
)
def test_parameters_are_shared_out_evenly(sizes, stages, counts):
    sharding = ParallelPlan(blocks="blocks", last=["head"]).arrange(
        Model(*sizes), Mesh(pipeline=stages)
    )
    assert sharding.blocks_per_stage == counts


def test_what_follows_the_blocks_may_run_on_the_first_stage():
    sharding = ParallelPlan(blocks="blocks").arrange(Model(4, [4] * 4, 4), Mesh(pipeline=2))
    assert sharding.blocks_per_stage == [1, 3]
