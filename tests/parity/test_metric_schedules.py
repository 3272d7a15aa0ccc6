"""Schedules that follow a metric give the same learning rates in both modes, and an error without a
metric.
"""

import numpy as np
import oneflow as flow
from oneflow.optim.lr_scheduler import ReduceLROnPlateau
from parity_cases import LOSS_BOUND
from refusals import refused
from toy import Tagger, batches, losses_of, make_trainer, optimizer_of, plain_losses

from libai.engine.hooks import EvalHook, LRHook

PERIOD = 2
METRICS = [1.0, 0.9, 0.95, 0.95, 0.8, 0.85, 0.9, 0.95]  # stagnates twice


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def trainer_with(mode, hooks):
    data = batches(PERIOD * len(METRICS), ignored=0.4)
    trainer = make_trainer(mode, data, Tagger, "sgd", plateau)
    trainer.register_hooks(hooks)
    return trainer, data


def evaluation():
    metrics = iter(METRICS)
    return EvalHook(PERIOD, lambda: {"eval/val/loss": next(metrics)})


def test_a_plateau_schedule_is_stepped_by_evaluations_and_equals_a_plain_loop(mode):
    trainer, data = trainer_with(mode, [LRHook("eval/val/loss"), evaluation()])
    losses = losses_of(trainer, len(data))

    flow.manual_seed(0)
    model = Tagger()
    optimizer = optimizer_of("sgd", model)
    schedule = plateau(optimizer)

    def evaluate(i):
        if (i + 1) % PERIOD == 0:
            schedule.step(METRICS[i // PERIOD])

    expected = plain_losses(model, optimizer, data.__getitem__, len(data), evaluate)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.0025, 0.00125]
    assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.00125]
    np.testing.assert_allclose(losses, expected, rtol=LOSS_BOUND)


def test_a_plateau_schedule_without_a_metric_is_refused(mode):
    with refused("ReduceLROnPlateau lowers the learning rate.*eval_metric"):
        trainer_with(mode, [LRHook()])
