"""Settings of a config take effect in both modes, or are refused before anything is built."""

import logging

import numpy as np
import oneflow as flow
import pytest
from contract_runs import dataset, default_setup, make_run, make_run_with, train, weights
from jobs import read_column, read_metrics
from refusals import refused
from toy import Classifier, are_equal, batches

from libai.config import LazyCall, LazyConfig
from libai.engine import HookBase, Run

pytestmark = pytest.mark.e2e


class HookOfTheConfig(HookBase):
    """A hook added by `train.extra_hooks`."""

    def __init__(self, value):
        self.value = value

    def after_step(self):
        self.trainer.storage.put_scalar("train/from_hook", self.value)


def test_two_evaluation_sets_are_kept_apart(mode, tmp_path):
    """LiBai names results by the class of the dataset, so the last one wins (defect 10)."""
    run = train(tmp_path, mode)
    last = read_metrics(tmp_path)[-1]
    assert last["eval/val/loss"] != last["eval/other/loss"]
    for name, count, seed in (
        ("val", 19, 1),
        ("other", 13, 2),
    ):  # ragged: 19 = 8 + 8 + 3, 13 = 8 + 5
        data = dataset(count, seed)
        outputs = run.trainer.predict(data)
        loss = outputs["losses"]["cls"].item()
        top1 = float((outputs["logits"].numpy().argmax(1) == data["y"]).mean())
        assert last[f"eval/{name}/loss"] == pytest.approx(loss, rel=1e-6)
        assert last[f"eval/{name}/accuracy"] == pytest.approx(top1, rel=1e-6)


def test_evaluation_is_tried_before_training(mode, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "libai"):
        run = make_run(tmp_path, mode, "train.num_sanity_eval_batches=1")
        plain = train(tmp_path / "plain", mode)
        run.train()
    assert "evaluation works: tested on 1 batch(es) of val, other" in caplog.text
    assert read_column(tmp_path) == read_column(tmp_path / "plain")
    assert are_equal(weights(run), weights(plain))


@pytest.mark.parametrize(
    "setting",
    [
        "train.num_sanity_eval_batches=1",
        "train.evaluation.eval_metric=null",
        "train.extra_hooks=[{_target_: test_contract_config.HookOfTheConfig, value: 1.0}]",
    ],
)
def test_a_mistake_in_the_evaluation_shows_before_the_first_iteration(setting, mode, tmp_path):
    run = make_run(tmp_path, mode, setting)
    run.evaluators["top"].labels_key = "labels"
    with refused(
        "needs batch\\['labels'\\], but batch has \\['x', 'y'\\]: choose one of them with "
        "labels_key=",
    ):
        run.train()
    assert run.trainer.completed_iters == 0


def test_trying_an_evaluation_without_data_is_a_mistake(mode, tmp_path):
    run = make_run(tmp_path, mode, "train.num_sanity_eval_batches=2", "~dataloader.test")
    with refused("num_sanity_eval_batches=2 has no data.*dataloader.test"):
        run.train()


def test_an_evaluation_without_any_batch_is_an_error(mode, tmp_path):
    run = make_run(tmp_path, mode)
    with refused(r"evaluation dataset 'mine' \(list\) returned no batch"):
        run.trainer.evaluate([], run.evaluators, "mine")


def test_auto_scale_lr_counts_accumulation_and_reaches_the_schedule(mode, tmp_path):
    """mmengine ignores accumulation (FEATURES B5).

    With 8 x 2 samples instead of 4, the rate is 4 times as high.
    """
    options = ("train.num_accumulation_steps=2", "train.train_iter=3")
    train(tmp_path / "plain", mode, *options)
    train(tmp_path / "scaled", mode, *options, "train.auto_scale_lr.base_batch_size=4")
    plain, scaled = (read_column(tmp_path / name, "train/lr") for name in ("plain", "scaled"))
    np.testing.assert_allclose(list(scaled.values()), 4 * np.array(list(plain.values())), rtol=1e-9)


def test_every_part_can_be_replaced_by_a_subclass(mode, tmp_path):
    built = []

    class Mine(Run):
        @classmethod
        def build_model(cls, run):
            built.append("model")
            return Classifier(width=5).train()

        @classmethod
        def build_optimizer(cls, run, model):
            built.append("optimizer")
            return flow.optim.SGD(model.parameters(), lr=0.1)

        @classmethod
        def build_lr_scheduler(cls, run, optimizer, plan):
            built.append("schedule")

        @classmethod
        def build_train_loader(cls, run, mesh, micro_batch_size, seed):
            built.append("train loader")
            return batches(3)

        @classmethod
        def build_test_loaders(cls, run, mesh, micro_batch_size):
            built.append("test loaders")
            return {"mine": batches(2)}

        @classmethod
        def build_evaluators(cls, run):
            built.append("evaluators")
            return Run.build_evaluators(run)

        def build_writers(self):
            built.append("writers")
            return super().build_writers()

    run = make_run(tmp_path, mode, "train.checkpointer.enabled=false", cls=Mine)
    run.train()
    assert sorted(built) == sorted(
        ["model", "optimizer", "schedule", "train loader", "test loaders", "evaluators", "writers"]
    )
    assert run.model.a.weight.shape[0] == 5
    assert "eval/mine/loss" in read_metrics(tmp_path)[-1]


class WithFixedNorm(Classifier):
    def __init__(self, in_eval_mode: bool):
        super().__init__()
        self.norm = flow.nn.BatchNorm1d(4).eval()
        if in_eval_mode:  # as pretrained models often are
            self.eval()


@pytest.mark.parametrize("in_eval_mode", [False, True])
def test_a_layer_that_the_model_puts_into_eval_mode_stays_in_it(in_eval_mode, tmp_path):
    section = {"model": LazyCall(WithFixedNorm)(in_eval_mode=in_eval_mode)}
    model = make_run_with(section, tmp_path, "eager").model
    assert (model.training, model.norm.training) == (True, in_eval_mode)


def test_a_run_may_have_a_trainer_class_for_one_mode(mode, tmp_path):
    class MyTrainer(Run.trainers[mode]):
        pass

    class MyRun(Run):
        trainers = {mode: MyTrainer}

    make_run(tmp_path, mode, cls=MyRun).train()
    with refused(
        "written by a trainer class of test_contract_config, .* Resume with the",
    ):
        make_run(tmp_path, mode, resume=True)
    other = "eager" if mode == "graph" else "graph"
    with refused(
        f"MyRun.trainers has no trainer for {other} mode. Add a class to it, or set ",
    ):
        make_run(tmp_path, other, cls=MyRun)


def test_the_config_that_ran_is_written_and_runs_again(mode, tmp_path):
    train(tmp_path / "first", mode)
    config = LazyConfig.load(tmp_path / "first" / "config.yaml")
    config.train.output_dir = str(tmp_path / "second")
    Run(default_setup(config)).train()
    assert read_column(tmp_path / "first") == read_column(tmp_path / "second")


def test_a_refusal_comes_before_anything_is_built(mode, tmp_path):
    with refused("train.amp.enabled=true .fp16. cannot be honoured"):
        make_run(tmp_path, mode, "train.amp.enabled=true", "model._target_=contract_runs.dataset")
    assert not (tmp_path / "checkpoints").exists()


def test_a_misspelt_metric_ends_the_run_before_the_first_update(mode, tmp_path):
    """A misspelt metric would silently disable the best checkpoint and early stopping."""
    metric, nearest = {"eager": ("val/los", "val/loss"), "graph": ("val/acuracy", "val/accuracy")}[
        mode
    ]
    setting = f"train.evaluation.eval_metric={metric}"
    with refused(f"eval_metric={metric} has no better direction.*Did you mean {nearest}"):
        make_run(tmp_path, mode, setting)
    run = make_run(
        tmp_path, mode, setting.replace("=", "=-"), "train.evaluation.early_stop_patience=1"
    )
    with refused(f"eval_metric={metric} is not measured.*Did you mean {nearest}"):
        run.train()
    assert run.trainer.completed_iters == 0
