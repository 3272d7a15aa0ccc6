"""Per-update numbers equal what eager OneFlow computes, bit for bit where it shows them."""

import doctest

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn, optim

import libai.optim.scalars as module
from libai.optim import bias_corrections, step_scalars


def update(optimizer, parameter):
    parameter.grad = flow.ones(*parameter.shape)
    optimizer.step()


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("target", [optim.Adam, optim.AdamW, optim.LAMB])
@pytest.mark.parametrize("corrected", [True, False])
def test_bias_corrections_are_bitwise_those_of_eager_mode(target, corrected):
    parameter = nn.Parameter(flow.ones(2))
    optimizer = target([parameter], lr=0.1, betas=(0.9, 0.95), do_bias_correction=corrected)
    for step in range(5):
        group = optimizer.param_groups[0]
        expected = bias_corrections(group, step)
        assert (step_scalars(optimizer)[0].bias_correction1, step_scalars(optimizer)[0].bias_correction2) == expected
        update(optimizer, parameter)  # OneFlow writes what it used into the group
        assert (group["bias_correction1"], group["bias_correction2"]) == expected


def test_every_group_has_its_own_numbers():
    groups = [
        {"params": [nn.Parameter(flow.ones(2))], "lr": 0.5, "betas": (0.5, 0.75)},
        {"params": [nn.Parameter(flow.ones(2))], "do_bias_correction": False},
    ]
    first, second = step_scalars(optim.Adam(groups, lr=0.1), step=1)
    assert (first.lr, first.bias_correction1, first.bias_correction2) == (0.5, 0.75, 1 - 0.75**2)
    assert (second.lr, second.bias_correction1, second.bias_correction2) == (0.1, 1.0, 1.0)


def test_adagrads_rate_decay_counts_from_the_second_update():
    decaying, replaced = nn.Parameter(flow.ones(3)), nn.Parameter(flow.ones(3))
    optimizer = optim.Adagrad([decaying], lr=0.1, lr_decay=0.5)
    plain = optim.Adagrad([replaced], lr=0.1)
    for step in range(4):
        rate = step_scalars(optimizer)[0].effective_lr
        assert rate == 0.1 / (1 + 0.5 * step)
        plain.param_groups[0]["lr"] = rate
        update(optimizer, decaying)
        update(plain, replaced)
        np.testing.assert_allclose(decaying.numpy(), replaced.numpy(), rtol=1e-6)


@pytest.mark.parametrize("target", [optim.SGD, optim.RMSprop, optim.Adadelta])
def test_the_others_need_the_rate_alone(target):
    optimizer = target([nn.Parameter(flow.ones(2))], lr=0.1)
    assert step_scalars(optimizer, step=7) == [module.StepScalars(0.1, 0.1, 1.0, 1.0)]
