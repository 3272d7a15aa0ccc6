"""The state of schedulers is JSON, exact on resume, and refused if it does not fit."""

import json

import oneflow as flow
import pytest
from oneflow.optim import lr_scheduler
from refusals import refused
from test_schedules import build_optimizer

from libai.scheduler import (
    FactorLR,
    WarmupCosineLR,
    WarmupLinearLR,
    in_sequence,
    load_scheduler_state,
    scheduler_state,
)


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


def test_saved_initial_rates_win_and_say_so(caplog):
    saved = WarmupCosineLR(build_optimizer(0.3), max_iter=20).state_dict()
    scheduler = WarmupCosineLR(build_optimizer(0.5), max_iter=20)
    scheduler.load_state_dict(saved)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.3
    assert "[0.3] of the saved run replace [0.5]" in caplog.text


def test_another_number_of_groups_is_refused():
    saved = WarmupCosineLR(build_optimizer(0.3, 0.1), max_iter=20)
    other = build_optimizer()
    with refused(r"has 2 parameter group\(s\), but this run's optimizer has 1"):
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
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ours": lambda o: WarmupCosineLR(o, max_iter=20, warmup_iter=4),
}


def advance(scheduler, start, stop):
    """Rates after each step; a plateau begins at step 2."""
    rates = []
    for step in range(start, stop):
        is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*[max(0.9, 1.0 - step / 10)] * is_plateau)
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", ONEFLOWS_OWN)
def test_any_scheduler_resumes_from_json(kind):
    build = ONEFLOWS_OWN[kind]
    whole = advance(build(build_optimizer()), 0, 12)
    for split in (0, 1, 6):
        first, resumed = build(build_optimizer()), build(build_optimizer())
        start = advance(first, 0, split)
        saved = through_json(scheduler_state(first, first.optimizer))
        load_scheduler_state(resumed, saved, resumed.optimizer)
        assert resumed.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
        assert start + advance(resumed, split, 12) == whole
    # negative control: a forgotten state changes the curve
    assert advance(build(build_optimizer()), 6, 12) != whole[6:]


def test_a_scheduler_without_state_is_refused():
    class Bare:
        def step(self):
            pass

    with refused("scheduler Bare has no state_dict"):
        scheduler_state(Bare(), build_optimizer())


def test_another_class_is_refused():
    cosine = ONEFLOWS_OWN["cosine"](build_optimizer())
    saved = scheduler_state(cosine, cosine.optimizer)
    with refused("saved scheduler is a CosineDecayLR, but this run's is a FactorLR"):
        load_scheduler_state(ONEFLOWS_OWN["ours"](cosine.optimizer), saved, cosine.optimizer)


def test_a_schedule_without_a_length_takes_the_rest_of_the_run():
    part = FactorLR(build_optimizer(), float)
    with refused("part 1 .* would begin after 5 iterations"):
        in_sequence(part.optimizer, [part, part], 5)


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
