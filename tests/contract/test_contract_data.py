"""Evaluators of one data set, the better direction of the deciding metric, and random numbers of
datasets, in both modes.
"""

import contract_runs
import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_config, make_run
from jobs import read_column
from refusals import refused

from libai.config import ConfigError, LazyCall, validate
from libai.data import InMemoryDataset
from libai.engine import Run, default_setup
from libai.evaluation import ClassificationEvaluator

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
    run = make_run(tmp_path, mode, SCORES, "train.evaluation.eval_metric=+val/score")
    metrics = run.evaluate()
    names = {
        dataset: {name.split("/")[2] for name in metrics if f"/{dataset}/" in name}
        for dataset in ("val", "other")
    }
    assert names == {"val": {"loss", "accuracy", "score"}, "other": {"loss", "accuracy"}}
    with pytest.raises(
        ConfigError, match="evaluators.vall has no _target_ and is not a dataset of"
    ):
        make_run(tmp_path, mode, SCORES.replace("{val:", "{vall:"))


def test_a_metric_without_direction_is_refused_before_data_is_read(mode, tmp_path):
    metric = "train.evaluation.eval_metric=val/score"
    reads_data = "dataloader.train.dataset.count=-1"  # this would fail too, but later
    with refused(r"Write \+val/score if larger is better \(LiBai's default\), -val/score"):
        make_run(tmp_path, mode, SCORES, metric, reads_data)
    largest = make_run(tmp_path, mode, SCORES, metric, "train.evaluation.eval_mode=max")
    assert largest.better == "max"
    known = make_run(tmp_path, mode, "train.evaluation.eval_metric=val/accuracy")
    assert known.better == "max"
    of_loss = make_run(tmp_path, mode, "train.evaluation.eval_metric=val/loss")
    assert of_loss.better == "min"


class Noisy(InMemoryDataset):
    """Adds a number of a global generator to the samples, as many augmentations do."""

    def __init__(self, count, draw, seed=0):
        super().__init__(**contract_runs.dataset(count, seed))
        self.draw = draw

    def get_batch(self, indices):
        batch = super().get_batch(indices)
        noise = np.random.rand() if self.draw == "numpy" else float(flow.rand(1))
        return {**batch, "x": batch["x"] + noise}


@pytest.mark.parametrize("draw", ["numpy", "oneflow"])
def test_random_numbers_in_datasets_are_resumed_and_leave_the_model_alone(mode, draw, tmp_path):
    def losses(name, iterations, *overrides, resume=False):
        config = make_config(tmp_path / name, mode, *overrides)
        config.dataloader.train.dataset = LazyCall(Noisy)(count=44, draw=draw)
        config.dataloader.test.val.dataset = LazyCall(Noisy)(count=19, draw=draw, seed=1)
        config.train.train_iter = iterations
        config.train.deterministic = True
        config.lr_scheduler = None
        Run(default_setup(validate(config)), resume=resume).train()
        return read_column(tmp_path / name), read_column(tmp_path / name, "eval/val/loss")

    expected, evaluated = losses("whole", 8)
    losses("parts", 4, "dataloader.train.num_workers=4")
    assert losses("parts", 8, resume=True) == (expected, evaluated)
    without, _ = losses("other", 8, "train.evaluation.eval_period=8", "dataloader.test={}")
    assert without == expected
