"""Whole runs from a config, in both modes (FEATURES A1 rows 14, 19-22; LiBai defects 1, 4, 6, 7,
10, 11).
"""

import hashlib
import json
import signal

import numpy as np
import pytest
from contract_runs import make_run, train, weights
from jobs import read_column, read_metrics
from toy import are_equal

from libai.engine import NonFiniteLoss
from libai.engine.hooks import CallbackHook
from libai.launch import guard, stop
from libai.utils.atomic import read_json


def other(mode):
    return "graph" if mode == "eager" else "eager"


def test_the_final_evaluation_is_written(mode, tmp_path):
    """LiBai evaluates after its writers have closed (defect 11).

    This run ends between two evaluations.
    """
    train(tmp_path, mode, "train.train_iter=7", "train.log_period=5")
    last = read_metrics(tmp_path)[-1]
    assert last["iter"] == 7
    assert {"eval/val/loss", "eval/val/accuracy", "train/loss"} <= set(last)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (
        summary["status"] == "finished"
        and summary["metrics"]["eval/val/loss"] == last["eval/val/loss"]
    )


def test_best_checkpoint_follows_the_named_metric(mode, tmp_path):
    run = train(
        tmp_path,
        mode,
        "train.evaluation.eval_metric=other/loss",
        "train.evaluation.eval_period=2",
        "train.checkpointer.max_to_keep=1",
    )
    values = read_column(tmp_path, "eval/other/loss")
    best = min(values, key=values.get)
    assert (tmp_path / "checkpoints" / f"iter_{best:07d}").is_dir()
    assert run.trainer.status == "finished"


def test_training_stops_early_when_the_metric_stalls(mode, tmp_path):
    run = train(
        tmp_path,
        mode,
        "train.train_iter=40",
        "train.evaluation.eval_period=2",
        "train.evaluation.eval_metric=val/loss",
        "train.evaluation.eval_mode=max",  # the loss falls, so the metric never improves
        "train.evaluation.early_stop_patience=2",
    )
    assert run.trainer.status == "stopped"
    assert run.trainer.completed_iters < 40
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["status"] == "stopped" and found["iterations"] == run.trainer.completed_iters
    assert (tmp_path / "checkpoints" / f"iter_{run.trainer.completed_iters:07d}").is_dir()


@pytest.mark.e2e
def test_training_continues_after_interrupts_in_the_same_process(mode, tmp_path, monkeypatch):
    """As in a notebook: an interrupt of the continued training counts as the first one and does not
    end the process.
    """
    monkeypatch.setattr(guard, "SAME_SIGNAL_SECONDS", 1e-9)
    monkeypatch.setattr(
        stop.os, "kill", lambda *arguments: pytest.fail("the process would have ended")
    )
    run = make_run(tmp_path, mode)
    interrupted = CallbackHook(
        after_step=lambda trainer: trainer.iter in (2, 4) and signal.raise_signal(signal.SIGINT)
    )
    run.trainer.register_hooks([interrupted])
    for done in (3, 5):
        with pytest.raises(stop.StoppedFromOutside):
            run.train()
        assert run.trainer.completed_iters == done
    assert run.train().iterations == 8
    plain = train(tmp_path / "plain", mode)
    assert read_column(tmp_path) == read_column(tmp_path / "plain")
    assert are_equal(weights(run), weights(plain))


@pytest.mark.parametrize("is_saving, code", [("true", 75), ("false", 143)])
def test_a_stop_without_checkpoints_is_not_resumable(tmp_path, is_saving, code):
    run = make_run(tmp_path, "eager", f"train.checkpointer.enabled={is_saving}")
    stopping = CallbackHook(after_step=lambda trainer: signal.raise_signal(signal.SIGTERM))
    run.trainer.register_hooks([stopping])
    with pytest.raises(stop.StoppedFromOutside) as stopped:
        run.train()
    assert stopped.value.code == code


@pytest.mark.e2e
def test_the_seed_of_a_resumed_run_is_kept_and_another_one_is_pointed_out(tmp_path, caplog):
    """With train.seed=null each start chooses a random seed; a resume with another seed would
    reshuffle the data.
    """
    first = make_run(tmp_path, "eager", "train.seed=null")
    first.train(until=2)
    first.checkpointer.save()
    again = make_run(tmp_path, "eager", "train.seed=null", resume=True)
    assert again.seed == first.seed and "seed was" not in caplog.text
    other = f"train.seed={first.seed + 1}"
    make_run(tmp_path, "eager", other, resume=True)
    pointed_out = f"seed was {first.seed} in the resumed run and is {first.seed + 1} now: the order"
    assert pointed_out in caplog.text


@pytest.mark.promise
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.e2e), 2])
def test_a_resumed_run_continues_the_curve_and_the_data(mode, tmp_path, accumulation):
    """LiBai restarts at sample 0 (defect 1).

    With batches of 8 from 44 samples, epochs end inside micro-batches.
    """
    steps = f"train.num_accumulation_steps={accumulation}"
    whole = train(tmp_path / "whole", mode, steps)
    half = make_run(tmp_path / "half", mode, steps)
    half.trainer.train(0, 4)  # the plan and the schedule are for 8 iterations
    half.trainer.loop.call_hooks("after_train")
    resumed = train(tmp_path / "half", mode, steps, resume=True)
    assert resumed.start_iter == 4
    expected, found = (read_column(tmp_path / name) for name in ("whole", "half"))
    assert {i: v for i, v in found.items() if i > 4} == {i: v for i, v in expected.items() if i > 4}
    assert are_equal(weights(resumed), weights(whole))
    # LiBai's eager mode counted micro-batches as iterations (defect 3)
    assert resumed.train_loader.state_dict() == {"consumed_samples": 8 * 8 * accumulation}


@pytest.mark.promise
def test_changing_the_mode_at_resume_keeps_the_optimizer_state(mode, tmp_path):
    """LiBai silently drops Adam's moments (defect 4)."""
    whole = train(tmp_path / "whole", mode)
    half = make_run(tmp_path / "half", mode)
    half.trainer.train(0, 4)
    train(tmp_path / "half", other(mode), resume=True)
    expected, found = (read_column(tmp_path / name) for name in ("whole", "half"))
    assert [found[i] for i in (5, 6, 7, 8)] == [expected[i] for i in (5, 6, 7, 8)]
    files = [
        tmp_path / name / "checkpoints/iter_0000008/model.safetensors" for name in ("whole", "half")
    ]
    digests = {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    for name in ("whole", "half"):
        digests.add(read_json(tmp_path / name / "summary.json")["weights_sha256"])
    assert len(digests) == 1, "the modes differ, or the summary has another digest than the file"

    # negative control: without the moments the same iterations differ
    fresh = make_run(
        tmp_path / "fresh", mode, f"train.load_weight={tmp_path}/half/checkpoints/iter_0000004"
    )
    fresh.trainer.train(4, 8)
    assert (
        max(np.abs(weights(fresh)[name] - value).max() for name, value in weights(whole).items())
        > 1e-3
    )


def test_corrupted_weights_never_reach_a_checkpoint(mode, tmp_path):
    """detectron2 checks only some iterations, and LiBai none (FEATURES B2)."""
    run = make_run(tmp_path, mode, "optim.lr=1e30", "~lr_scheduler", "train.log_period=100")
    with pytest.raises(NonFiniteLoss):
        run.train()
    saved = list((tmp_path / "checkpoints").glob("iter_*"))
    assert saved == []
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
