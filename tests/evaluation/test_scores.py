"""Confusion, AUC and calibration equal their definitions, for any batch size."""

import math

import numpy as np
import pytest
from batches import evaluate
from refusals import refused

from libai.evaluation import AUCEvaluator, CalibrationEvaluator, ConfusionEvaluator

random = np.random.default_rng(0)
true_classes = random.integers(0, 3, 60)
#: many equal scores
LOGITS = random.integers(-2, 3, (60, 4)).astype(np.float32)
BATCH_SIZES = pytest.mark.parametrize("batch_size", [1, 7, 60])


def measured(evaluator, batch_size=None, labels=true_classes, logits=LOGITS):
    return evaluate(evaluator, {"labels": labels}, {"logits": logits}, batch_size)


@BATCH_SIZES
def test_confusion_counts_pairs_of_label_and_prediction(batch_size):
    evaluator = ConfusionEvaluator()
    found = measured(evaluator, batch_size)
    predicted = LOGITS.argmax(1)
    values = []
    for kind in range(4):  # the fourth class is only predicted
        right = np.sum((predicted == kind) & (true_classes == kind))
        precision = right / np.sum(predicted == kind)
        recall = right / max(np.sum(true_classes == kind), 1)
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        values.append((precision, recall, f1))
        for other in range(4):
            pairs = np.sum((true_classes == other) & (predicted == kind))
            assert evaluator.matrix[other, kind] == pairs
    means = dict(zip(("precision", "recall", "f1"), np.mean(values, axis=0)))
    assert found == pytest.approx(means)
    image = evaluator.image(pixels=2)
    assert image.shape == (8, 8) and image.min() >= 0 and image.max() <= 1


@BATCH_SIZES
@pytest.mark.parametrize("positive", [0, 1])
def test_auc_is_the_share_of_pairs_in_the_right_order(positive, batch_size):
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    scores = probability[:, positive].round(6)
    pairs = [
        (first > second) + (first == second) / 2
        for first in scores[true_classes == positive]
        for second in scores[true_classes != positive]
    ]
    found = measured(AUCEvaluator(positive=positive), batch_size)
    assert found == {"auc": pytest.approx(np.mean(pairs))}


@BATCH_SIZES
def test_calibration_compares_confidence_with_accuracy(batch_size):
    probability = np.exp(LOGITS.astype(float))
    probability /= probability.sum(1, keepdims=True)
    confidence = probability.max(1)
    is_right = LOGITS.argmax(1) == true_classes
    expected = 0.0
    for low in np.arange(10) / 10:
        inside = (confidence >= low) & (confidence < low + 0.1)
        if inside.any():
            difference = abs(confidence[inside].mean() - is_right[inside].mean())
            expected += inside.mean() * difference
    found = measured(CalibrationEvaluator(num_bins=10), batch_size)
    assert found == {"calibration_error": pytest.approx(expected)}


def test_what_cannot_be_measured_is_nan():
    ones = np.ones(60, np.int64)
    assert math.isnan(measured(AUCEvaluator(), labels=ones)["auc"])
    one_nan = LOGITS.copy()
    one_nan[7, 2] = np.nan
    ignored = np.full(60, -100)
    for kind in (ConfusionEvaluator, AUCEvaluator, CalibrationEvaluator):
        assert all(map(math.isnan, measured(kind(), 7, logits=one_nan).values()))
        assert all(map(math.isnan, measured(kind(), labels=ignored).values()))


def test_a_class_that_does_not_exist_is_refused():
    with refused(r"AUCEvaluator\(positive=4\) got logits of 4 classes"):
        measured(AUCEvaluator(positive=4))
    with refused(r"image\(\) was called before an evaluation"):
        ConfusionEvaluator().image()
