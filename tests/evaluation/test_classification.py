"""Accuracy counts exactly, for any batch size, ties, nan and ignored labels."""

import math

import numpy as np
import pytest
from batches import evaluate as evaluate_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from libai.evaluation import ClassificationEvaluator, EvaluatorError


def evaluate(evaluator, logits, labels, batch_size=None):
    return evaluate_arrays(evaluator, {"labels": labels}, {"logits": logits}, batch_size)


def test_no_correct_prediction_is_lost():
    """LiBai multiplied a float accuracy by the count and cut it off: 8 right of 24 became 7."""
    logits = np.eye(2)[np.zeros(24, np.int64)]
    labels = np.array([0] * 8 + [1] * 16)
    assert ClassificationEvaluator().process({"labels": labels}, {"logits": logits}) == {
        "top1": 8,
        "num_samples": 24,
    }


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    k=st.integers(1, 5),
)
def test_topk_equals_sorting_for_any_batch_size(seed, count, batch_size, k):
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 4, (count, 5)).astype(np.float32)  # many ties
    labels = rng.integers(0, 5, count)
    order = np.argsort(-logits, axis=1, kind="stable")
    expected = np.mean([label in row[:k] for label, row in zip(labels, order)])
    name = "accuracy" if k == 1 else f"top{k}_accuracy"
    assert evaluate(ClassificationEvaluator([k]), logits, labels, batch_size) == {
        name: pytest.approx(expected)
    }


def test_nan_is_never_right():
    logits = np.full((3, 4), np.nan)
    logits[2] = [0, 9, np.nan, 0]
    assert evaluate(ClassificationEvaluator([1, 4]), logits, np.array([0, 3, 1])) == {
        "accuracy": 0.0,
        "top4_accuracy": 0.0,
    }


def test_tokens_are_judged_one_by_one_and_ignored_labels_do_not_count():
    logits, labels = np.eye(3)[[[0, 1], [2, 0]]], np.array([[0, -100], [2, 1]])
    assert evaluate(ClassificationEvaluator(), logits, labels) == {"accuracy": pytest.approx(2 / 3)}
    assert math.isnan(
        evaluate(ClassificationEvaluator(), logits, np.full((2, 2), -100))["accuracy"]
    )


@pytest.mark.parametrize(
    "evaluator, labels, text",
    [
        (ClassificationEvaluator(), [0, 3], "labels from 0 to 3 do not fit logits with 3 classes"),
        (ClassificationEvaluator(), [0, -1], "labels from -1 to 0"),
        (ClassificationEvaluator(), [0], r"logits \(2, 3\) for labels \(1,\)"),
        (ClassificationEvaluator([5]), [0, 1], "top-5 accuracy .* 3 classes"),
    ],
)
def test_what_cannot_be_judged_is_explained(evaluator, labels, text):
    with pytest.raises(EvaluatorError, match=text):
        evaluator.process({"labels": np.array(labels)}, {"logits": np.zeros((2, 3))})


@pytest.mark.parametrize("topk", [(), (0,)])
def test_topk_must_be_positive(topk):
    with pytest.raises(EvaluatorError, match=">= 1"):
        ClassificationEvaluator(topk)
