"""Whole runs from a config, in both modes (FEATURES A1 rows 14, 19-22; LiBai defects 1, 4, 6, 7, 10, 11)."""

from __future__ import annotations

import json
import logging

import contract_runs
import jobs
import numpy as np
import oneflow as flow
import pytest
import toy
from contract_runs import weights

from libai.config import LazyConfig
from libai.engine import HookBase, NonFiniteLoss, Run, hooks
from libai.engine.setup.support import check_supported
from libai.utils.errors import UserError


def other(mode):
    return "graph" if mode == "eager" else "eager"


class EightSamplesOnly(toy.Classifier):
    """Fails for any other batch, as a model does that was written for one shape."""

    def forward(self, x, y):
        assert x.shape[0] == 8
        loss = flow.nn.functional.cross_entropy(self.b(self.a(x)), y)
        return {"losses": {"cls": loss}, "logits": self.b(self.a(x))}


class HookOfTheConfig(HookBase):
    """Added by `train.extra_hooks`."""

    def __init__(self, value):
        self.value = value

    def after_step(self):
        self.trainer.storage.put_scalar("train/from_hook", self.value)


# ------------------------------------------------------------------------------------------- evaluation and files


def test_the_final_evaluation_is_written(mode, tmp_path):
    """LiBai evaluates after its writers have closed (defect 11). 8 is a period; 7 is not."""
    contract_runs.train(tmp_path, mode, "train.train_iter=7", "train.log_period=5")
    last = jobs.read_metrics(tmp_path)[-1]
    assert last["iter"] == 7
    assert {"eval/val/loss", "eval/val/accuracy", "train/loss"} <= set(last)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["metrics"]["eval/val/loss"] == last["eval/val/loss"]


def test_two_evaluation_sets_are_kept_apart(mode, tmp_path):
    """LiBai names results by the class of the dataset, so the last one wins (defect 10)."""
    run = contract_runs.train(tmp_path, mode)
    last = jobs.read_metrics(tmp_path)[-1]
    assert last["eval/val/loss"] != last["eval/other/loss"]
    for name, count, seed in (("val", 19, 1), ("other", 13, 2)):  # ragged: 19 = 8 + 8 + 3, 13 = 8 + 5
        data = contract_runs.dataset(count, seed)
        outputs = run.trainer.predict(data)
        loss = outputs["losses"]["cls"].item()
        top1 = float((outputs["logits"].numpy().argmax(1) == data["y"]).mean())
        assert last[f"eval/{name}/loss"] == pytest.approx(loss, rel=1e-6)
        assert last[f"eval/{name}/accuracy"] == pytest.approx(top1, rel=1e-6)


def test_the_model_is_in_training_mode_after_an_evaluation(mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode)
    run.evaluate()
    assert run.model.training


def test_best_checkpoint_follows_the_named_metric(mode, tmp_path):
    run = contract_runs.train(
        tmp_path,
        mode,
        "train.evaluation.eval_metric=other/loss",
        "train.evaluation.eval_period=2",
        "train.checkpointer.max_to_keep=1",
    )
    values = jobs.read_column(tmp_path, "eval/other/loss")
    best = min(values, key=values.get)
    assert (tmp_path / "checkpoints" / f"iter_{best:07d}").is_dir()
    assert run.trainer.status == "finished"


def test_training_stops_early_when_the_metric_stalls(mode, tmp_path):
    run = contract_runs.train(
        tmp_path,
        mode,
        "train.train_iter=40",
        "train.evaluation.eval_period=2",
        "train.evaluation.eval_metric=val/loss",
        "train.evaluation.eval_mode=max",  # the loss falls, so "better" never comes
        "train.evaluation.early_stop_patience=2",
    )
    assert run.trainer.status == "stopped"
    assert run.trainer.completed_iters < 40
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["status"] == "stopped" and found["iterations"] == run.trainer.completed_iters
    assert (tmp_path / "checkpoints" / f"iter_{run.trainer.completed_iters:07d}").is_dir()


def test_evaluation_is_tried_before_training(mode, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "libai"):
        run = contract_runs.make_run(tmp_path, mode, "train.num_sanity_eval_batches=1")
        plain = contract_runs.train(tmp_path / "plain", mode)
        run.train()
    assert "evaluation works: tried on 1 batch(es) of val, other" in caplog.text
    assert jobs.read_column(tmp_path) == jobs.read_column(tmp_path / "plain")
    assert all(np.array_equal(a, b) for a, b in zip(weights(run).values(), weights(plain).values()))


def test_a_mistake_in_the_evaluation_shows_before_the_first_iteration(mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode, "train.num_sanity_eval_batches=1")
    run.evaluators["top"].labels_key = "labels"
    with pytest.raises(UserError, match="needs batch\\['labels'\\], and batch has \\['x', 'y'\\]"):
        run.train()
    assert run.trainer.completed_iters == 0


def test_trying_an_evaluation_without_data_is_a_mistake(mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode, "train.num_sanity_eval_batches=2", "~dataloader.test")
    with pytest.raises(UserError, match="num_sanity_eval_batches=2 has no data.*dataloader.test"):
        run.train()


def test_an_evaluation_without_any_batch_says_so(mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode)
    with pytest.raises(UserError, match=r"evaluation dataset 'mine' \(list\) gave no batch"):
        run.trainer.evaluate([], run.evaluators, "mine")


# ------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_continues_the_curve_and_the_data(mode, tmp_path, accumulation):
    """LiBai starts again at sample 0 (defect 1). 8 samples of 44: epochs end in the middle of micro-batches."""
    steps = f"train.num_accumulation_steps={accumulation}"
    whole = contract_runs.train(tmp_path / "whole", mode, steps)
    half = contract_runs.make_run(tmp_path / "half", mode, steps)
    half.trainer.train(0, 4)  # the plan, and so the schedule, is that of 8 iterations
    half.trainer._call_hooks("after_train")
    resumed = contract_runs.train(tmp_path / "half", mode, steps, resume=True)
    assert resumed.start_iter == 4
    expected, found = (jobs.read_column(tmp_path / name) for name in ("whole", "half"))
    assert {i: v for i, v in found.items() if i > 4} == {i: v for i, v in expected.items() if i > 4}
    for name, value in weights(whole).items():
        assert np.array_equal(weights(resumed)[name], value), name
    assert resumed.train_loader.consumed_samples == whole.train_loader.consumed_samples


def test_changing_the_mode_at_resume_keeps_the_optimizer_state(mode, tmp_path):
    """LiBai drops Adam's moments without a word (defect 4)."""
    whole = contract_runs.train(tmp_path / "whole", mode)
    half = contract_runs.make_run(tmp_path / "half", mode)
    half.trainer.train(0, 4)
    resumed = contract_runs.train(tmp_path / "half", other(mode), resume=True)
    expected, found = (jobs.read_column(tmp_path / name) for name in ("whole", "half"))
    np.testing.assert_allclose([found[i] for i in (5, 6, 7, 8)], [expected[i] for i in (5, 6, 7, 8)], rtol=1e-5)
    for name, value in weights(whole).items():
        np.testing.assert_allclose(weights(resumed)[name], value, rtol=1e-4, atol=1e-6, err_msg=name)

    # negative control: without the moments the same iterations are others
    fresh = contract_runs.make_run(
        tmp_path / "fresh", mode, f"train.load_weight={tmp_path}/half/checkpoints/iter_0000004"
    )
    fresh.trainer.train(4, 8)
    assert max(np.abs(weights(fresh)[name] - value).max() for name, value in weights(whole).items()) > 1e-3


def test_resume_in_an_empty_folder_says_what_was_looked_for(mode, tmp_path):
    with pytest.raises(UserError, match="--resume found no usable checkpoint in .*the folder does not exist"):
        contract_runs.make_run(tmp_path, mode, resume=True)


def test_resuming_a_finished_run_trains_nothing(mode, tmp_path):
    first = contract_runs.train(tmp_path, mode)
    again = contract_runs.train(tmp_path, mode, resume=True)
    assert (again.start_iter, again.trainer.status) == (8, "finished")
    assert all(np.array_equal(a, b) for a, b in zip(weights(first).values(), weights(again).values()))


def test_corrupted_weights_never_reach_a_checkpoint(mode, tmp_path):
    """detectron2 looks at some iterations only, LiBai at none (FEATURES B2)."""
    run = contract_runs.make_run(tmp_path, mode, "optim.lr=1e30", "~lr_scheduler", "train.log_period=100")
    with pytest.raises(NonFiniteLoss):
        run.train()
    saved = list((tmp_path / "checkpoints").glob("iter_*"))
    assert saved == []
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


# ------------------------------------------------------------------------------------------- settings


def test_auto_scale_lr_counts_accumulation(mode, tmp_path):
    """mmengine forgets the accumulation (FEATURES B5). 8 x 2 samples against 4: four times the rate."""
    options = ("train.num_accumulation_steps=2", "train.train_iter=2", "~lr_scheduler")
    scaled = ("train.auto_scale_lr.base_batch_size=4",)
    contract_runs.train(tmp_path / "plain", mode, *options)
    contract_runs.train(tmp_path / "scaled", mode, *options, *scaled)
    assert jobs.read_column(tmp_path / "plain", "train/lr") == {1: 0.01, 2: 0.01}
    assert jobs.read_column(tmp_path / "scaled", "train/lr") == {1: 0.04, 2: 0.04}


def test_auto_scale_lr_reaches_the_schedule(mode, tmp_path):
    scaled = ("train.auto_scale_lr.base_batch_size=4",)
    contract_runs.train(tmp_path / "plain", mode)
    contract_runs.train(tmp_path / "scaled", mode, *scaled)
    plain, double = (jobs.read_column(tmp_path / name, "train/lr") for name in ("plain", "scaled"))
    np.testing.assert_allclose(list(double.values()), 2 * np.array(list(plain.values())), rtol=1e-9)


def test_extra_hooks_of_the_config_run(mode, tmp_path):
    hook = "train.extra_hooks=[{_target_: test_contract_run.HookOfTheConfig, value: 7}]"
    contract_runs.train(tmp_path, mode, "train.train_iter=2", hook)
    assert jobs.read_column(tmp_path, "train/from_hook") == {1: 7.0, 2: 7.0}


def test_anomalous_parameters_of_a_config_are_named(mode, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "libai"):
        contract_runs.train(
            tmp_path,
            mode,
            "model._target_=test_contract_loop.TwoHeads",
            "train.detect_anomalous_params=true",
            "train.train_iter=1",
            "train.evaluation.enabled=false",
        )
    assert "spare.weight, spare.bias" in caplog.text


def test_every_part_can_be_replaced_by_a_subclass(mode, tmp_path):
    built = []

    class Mine(Run):
        @classmethod
        def build_model(cls, run):
            built.append("model")
            return toy.Classifier(width=5).train()

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
            return toy.batches(3)

        @classmethod
        def build_test_loaders(cls, run, mesh, micro_batch_size):
            built.append("test loaders")
            return {"mine": toy.batches(2)}

        @classmethod
        def build_evaluators(cls, run):
            built.append("evaluators")
            return Run.build_evaluators(run)

        def build_writers(self):
            built.append("writers")
            return super().build_writers()

    run = contract_runs.make_run(tmp_path, mode, "train.checkpointer.enabled=false", cls=Mine)
    run.train()
    assert sorted(built) == sorted(
        ["model", "optimizer", "schedule", "train loader", "test loaders", "evaluators", "writers"]
    )
    assert run.model.a.weight.shape[0] == 5
    assert "eval/mine/loss" in jobs.read_metrics(tmp_path)[-1]


def test_the_config_that_ran_is_written_and_runs_again(mode, tmp_path):
    contract_runs.train(tmp_path / "first", mode)
    config = LazyConfig.load(tmp_path / "first" / "config.yaml")
    config.train.output_dir = str(tmp_path / "second")
    Run(contract_runs.default_setup(config)).train()
    assert jobs.read_column(tmp_path / "first") == jobs.read_column(tmp_path / "second")


# ------------------------------------------------------------------------------------------- what cannot be


def test_a_plain_run_is_refused_nothing(mode, tmp_path):
    check_supported(contract_runs.validate(contract_runs.make_config(tmp_path, mode)), mode, "cpu")


def test_a_refusal_comes_before_anything_is_built(mode, tmp_path):
    with pytest.raises(UserError, match="train.amp.enabled=true .fp16. cannot be honoured"):
        contract_runs.make_run(tmp_path, mode, "train.amp.enabled=true", "model._target_=contract_runs.dataset")
    assert not (tmp_path / "checkpoints").exists()


def test_a_wrong_model_target_is_explained(mode, tmp_path):
    with pytest.raises(UserError, match="the config's `model` is a dict, not an oneflow.nn.Module"):
        contract_runs.make_run(tmp_path, mode, "model={_target_: contract_runs.dataset, count: 3}")


# ------------------------------------------------------------------------------------------- settings without effect


def test_a_misspelt_metric_ends_the_run_before_the_first_update(mode, tmp_path):
    """It used to switch off best checkpoint and early stopping without a word."""
    metric, nearest = {"eager": ("val/los", "val/loss"), "graph": ("val/acuracy", "val/accuracy")}[mode]
    run = contract_runs.make_run(
        tmp_path, mode, f"train.evaluation.eval_metric={metric}", "train.evaluation.early_stop_patience=1"
    )
    with pytest.raises(UserError, match=f"eval_metric={metric} is not measured.*Did you mean {nearest}"):
        run.train()
    assert run.trainer.completed_iters == 0


def test_the_metric_of_an_evaluator_is_found(mode, tmp_path):
    """Negative control; and looking for it changes nothing."""
    plain = contract_runs.train(tmp_path / "plain", mode)
    named = contract_runs.train(tmp_path / "named", mode, "train.evaluation.eval_metric=val/accuracy")
    assert named.trainer.status == plain.trainer.status == "finished"
    assert jobs.read_column(tmp_path / "named") == jobs.read_column(tmp_path / "plain")


@pytest.mark.parametrize("kind", ["early stop", "best"])
def test_a_hook_refuses_a_metric_that_the_first_evaluation_does_not_give(kind, tmp_path):
    run = contract_runs.make_run(tmp_path, "eager")
    best = hooks.BestCheckpointHook(run.checkpointer, "eval/val/los")
    run.trainer.register_hooks([best if kind == "best" else hooks.EarlyStopHook("eval/val/los", 2)])
    with pytest.raises(UserError, match="eval_metric=val/los is not measured.*Did you mean val/loss"):
        run.train()
    assert run.trainer.completed_iters == 4, "the first evaluation"


def test_a_setting_without_effect_is_named_at_the_start_of_a_run(tmp_path, caplog):
    contract_runs.make_run(tmp_path, "eager", "train.ema.decay=0.5", "train.profile=[10,15]")
    told = [record.getMessage() for record in caplog.records if "nothing" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("train.ema.decay=0.5 does nothing: train.ema.enabled is false")
    assert told[1].startswith("train.profile=[10, 15] does nothing: this run goes from iteration 0 to 8")


def test_a_deterministic_run_checks_its_model(mode, tmp_path):
    run = contract_runs.train(tmp_path, mode, "train.deterministic=true")
    assert any(isinstance(hook, hooks.DeterminismHook) for hook in run.trainer.hooks)
