"""Evaluators of one data set and metric objects of other libraries, in both modes (docs/data.md)."""

from __future__ import annotations

import contract_runs
import numpy as np
import pytest

from libai.config import ConfigError

pytestmark = pytest.mark.e2e


class MeanTopScore:
    """A metric object as other libraries have them."""

    def reset(self):
        self.scores = []

    def update(self, predictions, targets):
        self.scores.append((predictions.argmax(1) == targets).astype(float))

    def compute(self):
        return np.concatenate(self.scores).mean()


def test_evaluators_of_one_data_set_and_metric_objects(mode, tmp_path):
    evaluators = "++train.evaluation.evaluators={val: {score: {_target_: test_contract_data.MeanTopScore}}}"
    run = contract_runs.make_run(tmp_path, mode, evaluators, "train.evaluation.eval_metric=val/score")
    metrics = run.evaluate()
    names = {
        dataset: {name.split("/")[2] for name in metrics if f"/{dataset}/" in name} for dataset in ("val", "other")
    }
    assert names == {"val": {"loss", "accuracy", "score"}, "other": {"loss", "accuracy"}}
    run.train()
    after = run.evaluate()
    assert after["eval/val/score"] == pytest.approx(after["eval/val/accuracy"])
    with pytest.raises(ConfigError, match="evaluators.vall names no _target_ and no dataset of"):
        contract_runs.make_run(tmp_path, mode, evaluators.replace("{val:", "{vall:"))
