"""Scaling the rates with the batch size."""

import oneflow as flow
from refusals import refused

from libai.optim import auto_scale_lr
from libai.scheduler import WarmupConstantLR


def build_optimizer():
    groups = [{"params": [flow.nn.Parameter(flow.zeros(2))], "lr": rate} for rate in (0.2, 0.1)]
    return flow.optim.SGD(groups, lr=0.2)


def test_all_groups_are_scaled_and_the_scheduler_starts_from_there():
    optimizer = build_optimizer()
    assert auto_scale_lr(optimizer, base_batch_size=64, global_batch_size=256) == 4.0
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.4]
    assert WarmupConstantLR(optimizer, max_iter=10).get_last_lr() == [0.8, 0.4]


def test_refused_after_a_scheduler_was_built():
    optimizer = build_optimizer()
    WarmupConstantLR(optimizer, max_iter=10)
    with refused("Call it before the scheduler is built"):
        auto_scale_lr(optimizer, 64, 256)
    flow.optim.lr_scheduler.CosineDecayLR(optimizer := build_optimizer(), 10)
    with refused("Call it before the scheduler is built"):
        auto_scale_lr(optimizer, 64, 256)
