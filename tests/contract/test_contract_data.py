"""Evaluators of one data set, and the better direction of the deciding metric, in both modes."""

import contract_runs
import pytest

from libai.config import ConfigError
from libai.evaluation import ClassificationEvaluator
from libai.utils.errors import UserError

pytestmark = pytest.mark.e2e
SCORES = "++train.evaluation.evaluators={val: {score: {_target_: test_contract_data.Score}}}"


class Score(ClassificationEvaluator):
    """An evaluator without a better direction for its metric."""

    def __init__(self):
        super().__init__(labels_key="y")
        self.directions = {}

    def compute(self, sums):
        return {"score": super().compute(sums)["accuracy"]}


def test_evaluators_of_one_data_set(mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode, SCORES, "train.evaluation.eval_metric=+val/score")
    metrics = run.evaluate()
    names = {
        dataset: {name.split("/")[2] for name in metrics if f"/{dataset}/" in name}
        for dataset in ("val", "other")
    }
    assert names == {"val": {"loss", "accuracy", "score"}, "other": {"loss", "accuracy"}}
    with pytest.raises(
        ConfigError, match="evaluators.vall has no _target_ and is not a dataset of"
    ):
        contract_runs.make_run(tmp_path, mode, SCORES.replace("{val:", "{vall:"))


def test_a_metric_without_direction_is_refused_before_data_is_read(mode, tmp_path):
    metric = "train.evaluation.eval_metric=val/score"
    reads_data = "dataloader.train.dataset.count=-1"  # this would fail too, but later
    with pytest.raises(
        UserError, match=r"Write \+val/score if larger is better \(LiBai's default\), -val/score"
    ):
        contract_runs.make_run(tmp_path, mode, SCORES, metric, reads_data)
    largest = contract_runs.make_run(
        tmp_path, mode, SCORES, metric, "train.evaluation.eval_mode=max"
    )
    assert largest.better == "max"
    known = contract_runs.make_run(tmp_path, mode, "train.evaluation.eval_metric=val/accuracy")
    assert known.better == "max"
    of_loss = contract_runs.make_run(tmp_path, mode, "train.evaluation.eval_metric=val/loss")
    assert of_loss.better == "min"
