"""Whole runs from a config, in both modes (FEATURES A1 rows 14, 19-22; LiBai defects 1, 4, 6, 7,
10, 11).
"""

import hashlib
import json
import signal

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_run, make_run_with, train, weights
from jobs import read_column, read_metrics
from toy import Classifier, are_equal

from libai import checkpoint
from libai.config import LazyCall
from libai.engine import NonFiniteLoss
from libai.engine.hooks import CallbackHook
from libai.launch import guard, stop
from libai.optim import get_param_groups
from libai.scheduler import WarmupConstantLR, WarmupCosineLR, WarmupLinearLR
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


class Counting(Classifier):
    """A classifier that counts its calls in a buffer, also in evaluations."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", flow.tensor(0.0))

    def forward(self, x, y):
        self.calls.add_(1.0)
        outputs = super().forward(x, y)
        outputs["losses"]["cls"] = outputs["losses"]["cls"] / (1 + 0.05 * self.calls)
        return outputs


ADAMW = LazyCall(flow.optim.AdamW)(params=LazyCall(get_param_groups)(only=r"^a\."), lr=0.01)
SGD = LazyCall(flow.optim.SGD)(lr=0.1, momentum=0.9)
COSINE = LazyCall(WarmupCosineLR)()
#: settings, and sections of the config
RESUMED = {
    "accumulation": (["train.num_accumulation_steps=2"], {}),
    "one batch at a time": ([], {}),
    "averages": (["train.ema.enabled=true", "train.ema.decay=0.5"], {}),
    "a buffer that evaluations change": ([], {"model": LazyCall(Counting)()}),
    "a list of schedules": (
        [],
        {"lr_scheduler": [LazyCall(WarmupConstantLR)(max_iter=2), COSINE]},
    ),
    "several optimizers": (
        [],
        {
            "optim": {"body": ADAMW, "head": SGD},
            "lr_scheduler": {"body": COSINE, "head": LazyCall(WarmupLinearLR)()},
        },
    ),
}


@pytest.mark.promise
@pytest.mark.parametrize(
    "name",
    [one if one == "accumulation" else pytest.param(one, marks=pytest.mark.e2e) for one in RESUMED],
)
def test_a_resumed_run_continues_the_curve_and_the_data(mode, tmp_path, name):
    """LiBai restarts at sample 0 (defect 1).

    With batches of 8 from 44 samples, epochs end inside micro-batches.
    """
    words, sections = RESUMED[name]
    whole = make_run_with(sections, tmp_path / "whole", mode, *words)
    whole.train()
    half = make_run_with(sections, tmp_path / "half", mode, *words)
    half.trainer.train(0, 4)  # the plan and the schedule are for 8 iterations
    half.trainer.loop.call_hooks("after_train")
    resumed = make_run_with(sections, tmp_path / "half", mode, *words, resume=True)
    assert resumed.start_iter == 4
    resumed.train()
    expected, found = (read_column(tmp_path / name) for name in ("whole", "half"))
    assert {i: v for i, v in found.items() if i > 4} == {i: v for i, v in expected.items() if i > 4}
    saved, wanted = (
        checkpoint.load(run.checkpointer.last_saved).tensors for run in (resumed, whole)
    )
    for group in ("model", "optimizer", *(["ema"] if name == "averages" else [])):
        assert are_equal(dict(saved[group]), dict(wanted[group])), group
    # LiBai's eager mode counted micro-batches as iterations (defect 3)
    micro_batches = 2 if name == "accumulation" else 1
    assert resumed.train_loader.state_dict() == {"consumed_samples": 8 * 8 * micro_batches}


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
