"""Metric objects with update and compute, as those of torchmetrics, judge whole evaluations."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from batches import evaluate

from libai.evaluation import EvaluatorError, MetricEvaluator, is_metric


class RankCorrelation:
    """Cannot be added over batches: it needs all of them."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.seen = []

    def update(self, predictions, targets):
        self.seen.append((predictions, targets))

    def compute(self):
        predictions, targets = (np.concatenate(parts) for parts in zip(*self.seen))
        ranks = [values.argsort().argsort() for values in (predictions, targets)]
        return np.corrcoef(*ranks)[0, 1]


def judged(evaluator, predictions, targets, batch_size=2, **more):
    return evaluate(evaluator, {"x": targets, "labels": targets}, {"scores": predictions, **more}, batch_size)


def test_the_metric_sees_all_batches_and_begins_anew_each_time():
    random = np.random.default_rng(0)
    targets = random.normal(size=50)
    predictions = targets + random.normal(size=50)
    evaluator = MetricEvaluator(RankCorrelation(), name="rank")
    values = [judged(evaluator, predictions, targets, size)["rank"] for size in (50, 7, 7)]
    assert values[0] == values[1] == values[2] and 0.3 < values[0] < 0.95


def test_several_numbers_keep_their_names_and_predictions_are_transformed():
    class Both(RankCorrelation):
        def compute(self):
            return {
                "count": sum(len(targets) for _, targets in self.seen),
                "largest": max(p.max() for p, _ in self.seen),
            }

    evaluator = MetricEvaluator(Both(), transform=lambda scores: scores.argmax(1))
    assert judged(evaluator, np.eye(6)[:4], np.arange(4), 3) == {"count": 4, "largest": 3}


def test_what_is_meant_must_be_clear():
    with pytest.raises(EvaluatorError, match=r"of the outputs \['more', 'scores'\] is its prediction"):
        judged(MetricEvaluator(RankCorrelation()), np.ones(2), np.ones(2), more=np.ones(2))
    named = MetricEvaluator(RankCorrelation(), prediction="scores", target="x")
    assert judged(named, np.arange(3.0), np.arange(3.0), more=np.ones(3))["RankCorrelation"] == pytest.approx(1)
    with pytest.raises(EvaluatorError, match="'z' is none.*target=KEY"):
        judged(MetricEvaluator(RankCorrelation(), target="z"), np.ones(2), np.ones(2))
    with pytest.raises(EvaluatorError, match="object has no update\\(predictions, targets\\) and compute"):
        MetricEvaluator(object())
    assert is_metric(RankCorrelation()) and not is_metric(MetricEvaluator(RankCorrelation()))


def test_a_metric_of_torch_gets_tensors_of_torch(monkeypatch):
    torch = ModuleType("torch")
    torch.from_numpy = lambda array: SimpleNamespace(array=array)
    monkeypatch.setitem(sys.modules, "torch", torch)
    base = type("Module", (), {"__module__": "torch.nn.modules.module"})

    class OfTorch(RankCorrelation, base):
        def update(self, predictions, targets):
            super().update(predictions.array, targets.array)

    assert judged(MetricEvaluator(OfTorch()), np.arange(4.0), np.arange(4.0))["OfTorch"] == pytest.approx(1)
