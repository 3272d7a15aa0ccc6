"""`train.writers` selects the writers of metrics (FEATURES B 21)."""

import importlib.util

import pytest
import tracker_stand_ins
from contract_runs import make_run, train
from refusals import refused

from libai.engine import Writer
from libai.engine.hooks import WriterHook

pytestmark = pytest.mark.e2e

TRACKERS = ("wandb", "trackio")


def train_and_resume(folder, mode, writers):
    """Run 8 iterations, then iterations 5 to 12 from the checkpoint of iteration 4, so 5 to 8 run
    twice.
    """
    setting = f"train.writers={writers}"
    train(folder, mode, setting)
    checkpoint = str(folder / "checkpoints" / "iter_0000004")
    run = make_run(folder, mode, setting, "train.train_iter=12", resume=checkpoint)
    run.train()
    return run


@pytest.fixture(scope="module", params=["eager", "graph"])
def resumed(request, tmp_path_factory):
    """Return `(run, data sent to each tracker)` of a run that made iterations 5 to 8 twice."""
    with pytest.MonkeyPatch.context() as patch:
        sent = {package: tracker_stand_ins.install(patch, package) for package in TRACKERS}
        folder = tmp_path_factory.mktemp("run") / request.param
        run = train_and_resume(folder, request.param, "[jsonl,wandb,trackio]")
    return run, sent


@pytest.mark.parametrize("package", TRACKERS)
def test_a_resumed_run_is_the_same_run_of_the_tracker(package, resumed):
    run, sent = resumed
    ((key, found),) = sent[package].items()
    assert run.folder.run_id in key
    losses = [(step, value) for name, step, value in found["rows"] if name == "train/loss"]
    assert dict(losses).keys() == set(range(1, 13))
    assert losses[-1][1] == pytest.approx(run.trainer.loop.metrics.latest["train/loss"])
    assert [step for name, step, _ in found["rows"] if name == "eval/val/loss"] == [4, 8, 8, 12]
    assert found["config"]["optim.lr"] == 0.01
    assert found["opened"] == found["finished"] == 2


@pytest.mark.parametrize("package", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_before_training(package, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with refused(f"asks for {package}, which is not installed. Run `pip install {package}`"):
        make_run(tmp_path, "eager", f"train.writers=[console,{package}]")
    assert not (tmp_path / "config.yaml").exists()


class MyWriter(Writer):
    def __init__(self, run_info, word="no"):
        self.info, self.word, self.calls = run_info, word, []

    def begin(self, start_iter=0):
        self.calls.append("begin")

    def write(self, record):
        self.calls.append(record.iter)

    def close(self):
        self.calls.append("close")


def test_a_custom_writer_gets_facts_about_its_run(mode, tmp_path):
    is_async = "true" if mode == "graph" else "false"
    writers = "train.writers=[{_target_: test_contract_writers.MyWriter, word: yes}]"
    run = train(tmp_path, mode, writers, f"train.async_write_metrics={is_async}")
    hook = next(hook for hook in run.trainer.hooks if isinstance(hook, WriterHook))
    writer = getattr(hook._writers[0], "_writer", hook._writers[0])
    assert (
        list(dict.fromkeys(writer.calls)) == ["begin", *range(1, 9), "close"]
        and writer.word == "yes"
    )
    assert (writer.info.output_dir, writer.info.run_id) == (tmp_path, run.folder.run_id)
    assert writer.info.name == tmp_path.name and writer.info.config["train.train_iter"] == 8
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "writers, told",
    [
        (
            "[wandbb]",
            r"train.writers=\['wandbb'\]: expected each of console, .*, wandb, trackio at most once",  # noqa: E501
        ),
        ("[jsonl,jsonl]", r"train.writers=\['jsonl', 'jsonl'\]: expected each of .* at most once"),
        ("[3]", r"train.writers\[0\] has no _target_"),
        ("[{_target_: fractions.Fraction}]", r"train.writers\[0\] is a Fraction, not a writer"),
        ("jsonl", "train.writers='jsonl': expected a list"),
    ],
)
def test_an_object_that_is_not_a_writer_is_refused(writers, told, tmp_path):
    with refused(told):
        make_run(tmp_path, "eager", f"train.writers={writers}")
