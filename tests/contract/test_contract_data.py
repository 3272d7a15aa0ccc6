"""Data of a run in both modes: worker processes, samples of different lengths, packing (docs/data.md)."""

from __future__ import annotations

import contract_runs
import jobs
import numpy as np
import pytest
from contract_words import Sentences, Tagger, collate_to_longest

from libai.config import ConfigError, LazyCall, validate
from libai.data import PackedDataset, PadCollate, SampleError, build_train_loader
from libai.engine import DefaultTrainer, default_setup
from libai.engine.hooks import CallbackHook

PADDING = {"input_ids": 0, "labels": -100}
PROCESSES = ("dataloader.train.num_workers=2", "dataloader.train.workers=processes")


def curve_of_words(output_dir, mode, *overrides, **loading):
    """The losses of a run over sentences, which are padded to the longest of each micro-batch."""
    config = contract_runs.make_config(output_dir, mode, "train.evaluation.enabled=false", *overrides)
    config.model = LazyCall(Tagger)()
    loading = {"dataset": LazyCall(Sentences)(), "collate": LazyCall(PadCollate)(padding=PADDING), **loading}
    config.dataloader.train = LazyCall(build_train_loader)(**loading)
    DefaultTrainer(default_setup(validate(config))).train()
    return jobs.read_column(output_dir)


def test_worker_processes_give_the_same_curve_and_resume_exactly(mode, tmp_path):
    contract_runs.train(tmp_path / "plain", mode)
    contract_runs.make_run(tmp_path / "half", mode, *PROCESSES).trainer.train(0, 4)
    contract_runs.train(tmp_path / "half", mode, *PROCESSES, resume=True)
    assert jobs.read_column(tmp_path / "half") == jobs.read_column(tmp_path / "plain")


def test_a_worker_that_dies_ends_the_run_with_its_reason(mode, tmp_path):
    run = contract_runs.make_run(tmp_path, mode, *PROCESSES, "dataloader.train.prefetch=0")

    def kill(trainer):
        if trainer.iter == 2:
            workers = run.train_loader._steps._reader._workers._workers
            workers[0][0].kill()

    run.trainer.register_hooks([CallbackHook(after_step=kill)])
    with pytest.raises(SampleError, match="a worker process that reads InMemoryDataset has ended by SIGKILL"):
        run.train()
    assert run.trainer.status == "failed"


def test_samples_of_different_lengths_train_alike_whatever_pads_them(mode, tmp_path):
    overrides = ("train.train_iter=6", "train.num_accumulation_steps=2", "train.train_micro_batch_size=4")
    loading = {"group_by_length": 8}
    expected = curve_of_words(tmp_path / "padded", mode, *overrides, **loading)
    rounded = LazyCall(PadCollate)(padding=PADDING, multiple_of=16)
    for name, collate in (("own", collate_to_longest), ("rounded", rounded)):
        found = curve_of_words(tmp_path / name, mode, *overrides, collate=collate, **loading)
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5, err_msg=name)


def test_packed_samples_train_in_rows_of_one_length(mode, tmp_path):
    packed = LazyCall(PackedDataset)(dataset=LazyCall(Sentences)(), sequence_length=24, padding=PADDING)
    curve = curve_of_words(tmp_path, mode, dataset=packed, collate=None)
    assert len(curve) == 8 and curve[8] < curve[1]


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
