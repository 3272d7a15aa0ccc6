"""The bias corrections that a graph is fed with equal what eager OneFlow computes, bit for bit."""

import oneflow as flow
import pytest
from oneflow import nn, optim

from libai.optim import bias_corrections


@pytest.mark.parametrize("target", [optim.Adam, optim.AdamW, optim.LAMB])
@pytest.mark.parametrize("corrected", [True, False])
def test_bias_corrections_are_bitwise_those_of_eager_mode(target, corrected):
    parameter = nn.Parameter(flow.ones(2))
    groups = [
        {"params": [parameter], "betas": (0.5, 0.75)},
        {"params": [nn.Parameter(flow.ones(2))]},
    ]
    optimizer = target(groups, lr=0.1, betas=(0.9, 0.95), do_bias_correction=corrected)
    for step in range(5):
        expected = [bias_corrections(group, step) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.parameters[0].grad = flow.ones(2)
        optimizer.step()  # OneFlow writes what it used into the groups
        assert [
            (group["bias_correction1"], group["bias_correction2"])
            for group in optimizer.param_groups
        ] == expected
