"""The state of schedulers is JSON, exact on resume, and refused if it does not fit."""

import json
import logging

import oneflow as flow
import pytest
from oneflow.optim import lr_scheduler

from libai.scheduler import (
    FactorLR,
    WarmupCosineLR,
    WarmupLinearLR,
    in_sequence,
    load_scheduler_state,
    scheduler_state,
)
from libai.utils.errors import UserError


def build_optimizer(*rates):
    groups = [
        {"params": [flow.nn.Parameter(flow.zeros(2))], "lr": rate} for rate in rates or (0.3,)
    ]
    return flow.optim.SGD(groups, lr=0.3)


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


def advance(scheduler, num_iters, metrics=()):
    """Rates after each of `num_iters` steps."""
    rates = []
    for index in range(num_iters):
        scheduler.step(*([metrics[index]] if metrics else []))
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
    return rates


def test_saved_initial_rates_win_and_say_so(caplog):
    saved = WarmupCosineLR(build_optimizer(0.3), max_iter=20).state_dict()
    scheduler = WarmupCosineLR(build_optimizer(0.5), max_iter=20)
    with caplog.at_level(logging.WARNING):
        scheduler.load_state_dict(saved)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.3
    assert "[0.3] of the saved run replace [0.5]" in caplog.text


def test_another_number_of_groups_is_refused():
    saved = WarmupCosineLR(build_optimizer(0.3, 0.1), max_iter=20)
    other = build_optimizer()
    with pytest.raises(
        UserError, match=r"has 2 parameter group\(s\), but this run's optimizer has 1"
    ):
        load_scheduler_state(
            WarmupCosineLR(other, max_iter=20), scheduler_state(saved, saved.optimizer), other
        )


class Halving:
    """A callable object: its plain attributes are state, its function is not."""

    def __init__(self):
        self.calls = 0
        self.shape = lambda step: 0.5**step

    def __call__(self, step):
        self.calls += 1
        return self.shape(step) / (1 + self.calls // 100)


ONEFLOWS_OWN = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "callable_object": lambda o: lr_scheduler.LambdaLR(o, Halving()),
    "cosine": lambda o: lr_scheduler.CosineDecayLR(o, 20),
    "warmup_multi_step": lambda o: lr_scheduler.WarmUpLR(
        lr_scheduler.MultiStepLR(o, [5, 8]), warmup_factor=0.1, warmup_iters=3
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ours": lambda o: WarmupCosineLR(o, max_iter=20, warmup_iter=4),
}


@pytest.mark.parametrize("kind", ONEFLOWS_OWN)
def test_any_scheduler_resumes_from_json(kind):
    whole = advance(ONEFLOWS_OWN[kind](build_optimizer()), 12)
    first = ONEFLOWS_OWN[kind](build_optimizer())
    start = advance(first, 6)
    saved = through_json(scheduler_state(first, first.optimizer))
    resumed = ONEFLOWS_OWN[kind](build_optimizer())
    load_scheduler_state(resumed, saved, resumed.optimizer)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == start[-1]
    assert start + advance(resumed, 6) == whole


def test_plateau_resumes_from_json_before_and_after_its_first_step():
    losses = [1.0, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95]

    def build():
        return lr_scheduler.ReduceLROnPlateau(build_optimizer(), patience=1)

    whole = advance(build(), 8, losses)
    assert whole[-1] < whole[0]
    for split in (0, 1, 4):
        first = build()
        start = advance(first, split, losses[:split])
        resumed = build()
        load_scheduler_state(
            resumed, through_json(scheduler_state(first, first.optimizer)), resumed.optimizer
        )
        assert start + advance(resumed, 8 - split, losses[split:]) == whole


def test_functions_in_a_state_come_from_the_config_again():
    scheduler = ONEFLOWS_OWN["callable_object"](build_optimizer())
    saved = scheduler_state(scheduler, scheduler.optimizer)
    assert saved["state"]["lr_lambdas"] == [{"calls": 1}]


def test_a_scheduler_without_state_is_refused():
    class Bare:
        def step(self):
            pass

    with pytest.raises(UserError, match="scheduler Bare has no state_dict"):
        scheduler_state(Bare(), build_optimizer())


def test_another_class_is_refused():
    cosine = ONEFLOWS_OWN["cosine"](build_optimizer())
    saved = scheduler_state(cosine, cosine.optimizer)
    with pytest.raises(
        UserError, match="saved scheduler is a CosineDecayLR, but this run's is a FactorLR"
    ):
        load_scheduler_state(ONEFLOWS_OWN["ours"](cosine.optimizer), saved, cosine.optimizer)


def test_a_schedule_without_a_length_takes_the_rest_of_the_run():
    part = FactorLR(build_optimizer(), float)
    with pytest.raises(UserError, match="part 1 .* would begin after 5 iterations"):
        in_sequence(part.optimizer, [part, part], 5)


def test_a_forgotten_state_changes_the_curve():
    """Negative control for the resume tests."""
    for build in ONEFLOWS_OWN.values():
        whole = advance(build(build_optimizer()), 12)
        start = advance(build(build_optimizer()), 6)
        assert start + advance(build(build_optimizer()), 6) != whole


def test_a_longer_schedule_is_continued_at_its_own_rate():
    """A rate that other code has set is kept, because the next update uses it."""
    for changed, expected in ((None, 0.5), (0.7, 0.7)):
        optimizer = flow.optim.SGD(flow.nn.Linear(1, 1).parameters(), lr=1.0)
        short = WarmupLinearLR(optimizer, 4)
        for _ in range(4):
            short.step()
        if changed is not None:
            optimizer.param_groups[0]["lr"] = changed
        saved = scheduler_state(short, optimizer)
        other = flow.optim.SGD(flow.nn.Linear(1, 1).parameters(), lr=1.0)
        load_scheduler_state(WarmupLinearLR(other, 8), saved, other)
        assert other.param_groups[0]["lr"] == expected
