"""A known cause of different results is planted, and the comparison of test_equivalence must detect
it. test_same_bits.py plants smaller ones, and tests/zoo another learning rate in each model.
"""

import pytest
from parity_cases import OPTIMIZERS, Case, compare, expected_of, trained
from parity_variants import ADAMW, MeanOfMeans


def assert_seen(difference, case, at_least=None):
    assert not difference.is_rounding(case), difference
    if at_least is not None:
        assert difference.loss > at_least, difference


def test_the_mean_of_micro_batch_means(mode):
    case = Case(ADAMW, accumulation=4)
    assert_seen(
        compare(trained(case.with_(model=MeanOfMeans), mode), expected_of(case)), case, 1e-4
    )


def test_a_result_that_is_not_a_number():
    case = Case(OPTIMIZERS["sgd"])
    right = expected_of(case)
    right.losses[3] = float("nan")
    assert compare(right, expected_of(case)).loss == pytest.approx(float("inf"))
