"""FLOPs are counted per operation of the first rehearsed update, for any module, and are equal in
both modes.
"""

import oneflow as flow
import pytest
from oneflow import nn
from toy import make_trainer

from libai.forward.flops import counted_flops


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x @ flow.ones(6, 3), 5 * 6 * 3),
        (lambda x: flow.matmul(x, x, transpose_a=True), 6 * 5 * 6),
        (lambda x: flow.bmm(x, x.transpose(1, 2)), 5 * 6 * 5),
        (nn.Linear(6, 3), 5 * 6 * 3),
        (
            lambda x: nn.Conv2d(4, 8, 3, padding=1, groups=2)(flow.ones(2, 4, 5, 5)),
            (8 * 25) * 2 * 9,
        ),
        (lambda x: flow.relu(x + 1) * x, 0),
    ],
)
def test_products_of_matrices_and_convolutions(function, expected):
    with counted_flops() as found:
        function(flow.ones(2, 5, 6))
    assert sum(found) == 2 * 3 * 2 * expected


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer_counts_the_flops_of_a_sample(mode, accumulation):
    # a rehearsal counts them
    trainer = make_trainer(mode, num_accumulation_steps=accumulation, rehearse=None)
    assert trainer.loop.flops_per_sample is None
    trainer.train(0, 2)
    assert trainer.loop.flops_per_sample == 3 * 2 * (8 * 16 + 16 * 4)
