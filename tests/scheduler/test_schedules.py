"""Schedules against their formulas and against OneFlow's own schedulers."""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow.optim import lr_scheduler
from refusals import refused

from libai.scheduler import (
    WarmupConstantLR,
    WarmupCosineAnnealingLR,
    WarmupCosineLR,
    WarmupExponentialLR,
    WarmupLinearLR,
    WarmupMultiStepLR,
    WarmupPolynomialLR,
    WarmupStepLR,
)

MAX_ITER = 40
BASE_LR = 0.3


def build_optimizer(*rates):
    groups = [
        {"params": [flow.nn.Parameter(flow.zeros(2))], "lr": rate} for rate in rates or (BASE_LR,)
    ]
    return flow.optim.SGD(groups, lr=BASE_LR)


def rates_of(build, num_iters=MAX_ITER + 5, group=0, **options):
    """The rates that `build(optimizer, **options)` gives to the first `num_iters` updates."""
    optimizer = build_optimizer()
    scheduler = build(optimizer, **options)
    rates = []
    for _ in range(num_iters):
        rates.append(optimizer.param_groups[group]["lr"])
        scheduler.step()
    return rates


def warm(inner, method="linear"):
    return lambda optimizer: lr_scheduler.WarmUpLR(
        inner(optimizer), warmup_factor=0.1, warmup_iters=6, warmup_method=method
    )


SAME_AS_ONEFLOW = {
    "cosine": (
        WarmupCosineLR,
        {"alpha": 0.1},
        lambda o: lr_scheduler.CosineDecayLR(o, MAX_ITER, alpha=0.1),
    ),
    "polynomial": (
        WarmupPolynomialLR,
        {"power": 2.0, "end_learning_rate": 0.01},
        lambda o: lr_scheduler.PolynomialLR(o, MAX_ITER, end_learning_rate=0.01, power=2.0),
    ),
    "linear": (
        WarmupLinearLR,
        {"end_factor": 0.2},
        lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=MAX_ITER),
    ),
    "multi_step": (
        WarmupMultiStepLR,
        {"milestones": [10, 30], "gamma": 0.5},
        lambda o: lr_scheduler.MultiStepLR(o, [10, 30], gamma=0.5),
    ),
    "step": (WarmupStepLR, {"step_size": 7}, lambda o: lr_scheduler.StepLR(o, 7)),
    "exponential": (
        WarmupExponentialLR,
        {"gamma": 0.9},
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    ),
}


@pytest.mark.parametrize("method", ["linear", "constant"])
@pytest.mark.parametrize("kind", SAME_AS_ONEFLOW)
def test_same_rates_as_oneflow_with_and_without_warmup(kind, method):
    ours, options, theirs = SAME_AS_ONEFLOW[kind]
    warmup = {"warmup_iter": 6, "warmup_factor": 0.1, "warmup_method": method}
    assert_allclose(
        rates_of(ours, max_iter=MAX_ITER, **warmup, **options),
        rates_of(warm(theirs, method)),
        rtol=1e-12,
    )
    assert_allclose(rates_of(ours, max_iter=MAX_ITER, **options), rates_of(theirs), rtol=1e-12)


def test_constant_after_a_linear_warmup():
    rates = rates_of(WarmupConstantLR, max_iter=MAX_ITER, warmup_iter=4, warmup_factor=0.0)
    assert_allclose(rates[:6], BASE_LR * np.array([0, 0.25, 0.5, 0.75, 1, 1]))


def test_by_epoch_changes_the_rate_at_epoch_borders_only():
    rates = rates_of(
        WarmupCosineLR, max_iter=MAX_ITER, warmup_iter=4, by="epoch", iters_per_epoch=8
    )
    smooth = rates_of(WarmupCosineLR, max_iter=MAX_ITER)
    assert len(set(rates[:4])) == 4  # the warm-up goes on per iteration
    assert rates[8:16] == [smooth[8]] * 8
    assert rates[32:40] == [smooth[32]] * 8


def test_groups_keep_their_own_rates():
    optimizer = build_optimizer(0.2, 0.1)
    scheduler = WarmupCosineAnnealingLR(
        optimizer, MAX_ITER, warmup_iter=4, warmup_factor=0.5, eta_min=0.02
    )
    for _ in range(MAX_ITER):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(first / 2)
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.02, 0.01])


@pytest.mark.parametrize(
    "build, options, text",
    [
        (WarmupCosineLR, {"warmup_method": "cosine"}, "warmup_method='cosine' is unknown"),
        (
            WarmupCosineLR,
            {"warmup_iter": 41},
            "warm-up of 41 iterations does not fit into the run of 40",
        ),
        (WarmupCosineLR, {"warmup_factor": -0.1}, "warmup_factor=-0.1.*0 <= warmup_factor"),
        (WarmupCosineLR, {"by": "step"}, "by='step' is unknown"),
        (WarmupCosineLR, {"by": "epoch"}, "iters_per_epoch=None"),
        (WarmupStepLR, {"step_size": 0}, "step_size=0"),
        (WarmupMultiStepLR, {"milestones": [30, 10]}, "do not increase"),
        (WarmupMultiStepLR, {"milestones": [0.5, 10]}, r"are the iterations \[20, 10\]"),
    ],
)
def test_mistakes_are_named(build, options, text):
    with refused(text):
        build(build_optimizer(), max_iter=MAX_ITER, **options)


@pytest.mark.parametrize(
    "samples, batch", [(40, 8), (29, 10), (48, 32), (1437, 256), (50_000, 4096)]
)
def test_an_epoch_that_is_no_whole_number_of_iterations_decays_once(samples, batch):
    """Every schedule over epochs changes in the first iteration that starts in the epoch."""
    unit = samples / batch
    starts = [-(-epoch * samples // batch) for epoch in range(31)]
    epochs = np.searchsorted(starts, np.arange(starts[-1]), side="right") - 1
    assert epochs[-1] == 29
    options = {"max_iter": starts[-1], "gamma": 0.9, "by": "epoch", "iters_per_epoch": unit}
    for build, own, decays in (
        (WarmupExponentialLR, {}, epochs),
        (WarmupStepLR, {"step_size": 1}, epochs),
        (WarmupStepLR, {"step_size": 3}, epochs // 3),
        (WarmupMultiStepLR, {"milestones": [4, 7]}, 1 * (epochs >= 4) + (epochs >= 7)),
    ):
        rates = rates_of(build, len(epochs), **options, **own)
        assert_allclose(rates, BASE_LR * 0.9**decays, rtol=1e-12, err_msg=str(build))


def test_lengths_in_epochs_need_to_know_the_epoch():
    for name in ("max_epoch", "warmup_epoch"):
        with refused(f"{name}=2 needs the length of an epoch, but iters_per_epoch=None"):
            WarmupCosineLR(build_optimizer(), 30, **{name: 2})
