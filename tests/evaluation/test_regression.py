"""Regression metrics equal those of the whole arrays for any batches."""

import math

import numpy as np
import pytest
from batches import evaluate as evaluate_arrays

from libai.evaluation import EvaluatorError, RegressionEvaluator


def evaluate(predictions, labels, batch_size=None):
    return evaluate_arrays(
        RegressionEvaluator(), {"labels": labels}, {"predictions": predictions}, batch_size
    )


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_metrics_are_those_of_the_whole_arrays(batch_size, offset):
    rng = np.random.default_rng(0)
    labels = rng.normal(size=100) + offset
    errors = rng.normal(size=100)
    predictions = labels + errors
    # Moments about zero lose digits for values far from it: n * eps * (sum of squares) / (scatter),
    # with a scatter per sample of 1. Absolute, since r2 and pearson are differences and ratios of
    # order 1 that may be close to 0.
    tolerance = len(labels) * np.finfo(np.float64).eps * (1 + offset**2)
    assert evaluate(predictions, labels, batch_size) == pytest.approx(
        {
            "mse": np.mean(errors**2),
            "mae": np.mean(abs(errors)),
            "r2": 1 - np.mean(errors**2) / labels.var(),
            "pearson": np.corrcoef(labels, predictions)[0, 1],
        },
        abs=tolerance,
    )


def test_float32_is_summed_in_float64():
    values = np.full(3_000_000, 0.1, np.float32)
    assert evaluate(values, np.zeros_like(values), 10**7)["mae"] == pytest.approx(
        float(np.float32(0.1)), rel=1e-12
    )


def test_a_trailing_axis_of_one_is_allowed():
    assert evaluate(np.array([[1.0], [2.0]]), np.array([1.0, 4.0]))["mse"] == 2.0


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_constant_labels_have_no_correlation(value):
    result = evaluate(np.arange(30.0), np.full(30, value), batch_size=1)
    assert math.isnan(result["r2"]) and math.isnan(result["pearson"]) and result["mae"] > 0


def test_other_shapes_are_refused():
    with pytest.raises(EvaluatorError, match=r"predictions \(2, 3\) for labels \(2,\)"):
        evaluate(np.zeros((2, 3)), np.zeros(2))
