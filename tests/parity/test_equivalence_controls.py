"""Known causes of different results are planted, and the comparison of test_equivalence must detect
them. test_same_bits.py plants smaller ones, and tests/zoo another learning rate in each model.
"""

import oneflow as flow
import pytest
from parity_cases import OPTIMIZERS, Case, compare, expected_of, plain_loop, trained
from parity_variants import ADAMW, MOMENTUM, SCHEDULES, MeanOfMeans, scheduled


def assert_seen(difference, case, at_least=None):
    assert not difference.is_rounding(case), difference
    if at_least is not None:
        assert difference.loss > at_least, difference


def test_the_mean_of_micro_batch_means(mode):
    case = Case(ADAMW, accumulation=4)
    assert_seen(
        compare(trained(case.with_(model=MeanOfMeans), mode), expected_of(case)), case, 1e-4
    )


@pytest.mark.e2e
def test_clipping_each_group_by_its_own_norm(mode, monkeypatch):
    """OneFlow's `optimizer.clip_grad()` clips each group by its own norm."""
    case = Case(MOMENTUM, max_norm=0.05)
    result = trained(case, mode)

    def clip_each_group(parameters, max_norm):
        parameters = list(parameters)
        parts = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]]
        return [original(part, max_norm) for part in parts][0]

    original = flow.nn.utils.clip_grad_norm_
    monkeypatch.setattr(flow.nn.utils, "clip_grad_norm_", clip_each_group)
    assert_seen(compare(result, plain_loop(case)), case, 1e-4)


class Late:
    """A schedule whose first step does nothing."""

    def __init__(self, optimizer):
        self._schedule = SCHEDULES["cosine"](optimizer)
        self._has_begun = False

    def step(self):
        if self._has_begun:
            self._schedule.step()
        self._has_begun = True


@pytest.mark.e2e
def test_a_schedule_that_is_one_iteration_late(mode):
    case = scheduled("cosine")
    difference = compare(trained(case.with_(schedule=Late), mode), expected_of(case))
    assert difference.rate > 0
    assert_seen(difference, case, 1e-4)


def test_a_result_that_is_not_a_number():
    case = Case(OPTIMIZERS["sgd"])
    right = expected_of(case)
    right.losses[3] = float("nan")
    assert compare(right, expected_of(case)).loss == pytest.approx(float("inf"))
