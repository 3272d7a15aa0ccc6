"""`train.writers`: where the numbers of a run go (FEATURES B 21)."""

from __future__ import annotations

import csv
import importlib.util
import json

import contract_runs
import jobs
import pytest
import tracker_stand_ins

from libai.config import schema
from libai.engine import Writer
from libai.engine.hooks import WriterHook
from libai.engine.log.tensorboard import TensorBoardWriter
from libai.engine.run.default_hooks import _WRITERS
from libai.utils.errors import UserError

TRACKERS = ("wandb", "mlflow", "aim")


def train_and_resume(folder, mode, writers):
    """8 iterations, then 5 to 12 from the checkpoint of iteration 4: iterations 5 to 8 are made twice."""
    setting = f"train.writers={writers}"
    contract_runs.train(folder, mode, setting)
    checkpoint = str(folder / "checkpoints" / "iter_0000004")
    run = contract_runs.make_run(folder, mode, setting, "train.train_iter=12", resume=checkpoint)
    run.train()
    return run


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module", params=["eager", "graph"])
def resumed(request, tmp_path_factory):
    """`(folder, run, what each tracker was sent)` of a run that made iterations 5 to 8 twice."""
    with pytest.MonkeyPatch.context() as patch:
        sent = {package: tracker_stand_ins.install(patch, package) for package in TRACKERS}
        folder = tmp_path_factory.mktemp("run") / request.param
        run = train_and_resume(folder, request.param, "[jsonl,csv,wandb,mlflow,aim]")
    return folder, run, sent


def test_csv_has_the_numbers_of_json_lines_also_after_a_resume(resumed):
    folder, _, _ = resumed
    rows, lines = read_csv(folder / "metrics.csv"), jobs.read_metrics(folder)
    assert [row["iter"] for row in rows] == [str(i) for i in range(1, 13)]
    assert [{tag: float(cell) for tag, cell in row.items() if cell} for row in rows] == lines
    assert "eval/val/accuracy" in rows[11]


@pytest.mark.parametrize("package", TRACKERS)
def test_a_resumed_run_is_the_same_run_of_the_tracker(package, resumed):
    """Stand-ins; for the packages themselves see the next test."""
    _, run, sent = resumed
    (found,) = sent[package].values()
    losses = [(step, value) for name, step, value in found["rows"] if name == "train/loss"]
    assert [step for step, _ in losses] == list(range(1, 13))
    assert losses[-1][1] == pytest.approx(run.trainer.loop.metrics.latest["train/loss"])
    assert [step for name, step, _ in found["rows"] if name == "eval/val/loss"] == [4, 8, 12]
    assert str(found["config"]["optim.lr"]) == "0.01"
    assert found["summary"]["iterations"] == 12 and found["summary"]["status"] == "finished"
    assert any("train_iter" in text for text in found["texts"].values())
    assert found["opened"] == 2 and found["finished"]


@pytest.mark.slow
@pytest.mark.parametrize("package", TRACKERS)
@pytest.mark.filterwarnings("default")
def test_the_packages_themselves_take_what_is_sent(package, mode, tmp_path, monkeypatch):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    writer = package if package != "aim" else f"{{_target_: libai.engine.log.trackers.AimWriter, repo: {tmp_path}}}"
    train_and_resume(tmp_path / "run", mode, f"[{writer}]")
    tracker_id = json.loads((tmp_path / "run" / f"{package}.json").read_text())["id"]
    assert sorted(_STEPS[package](tmp_path, tracker_id)) == list(range(1, 13))


def _steps_of_wandb(folder, tracker_id):
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    for path in folder.glob(f"run/wandb/offline-run-*/run-{tracker_id}.wandb"):
        store = DataStore()
        store.open_for_scan(str(path))
        while data := store.scan_data():
            record = wandb_internal_pb2.Record.FromString(data)
            keys = {item.key or item.nested_key[0] for item in record.history.item}
            if "train/loss" in keys:
                yield record.history.step.num


def _steps_of_mlflow(folder, tracker_id):
    from mlflow import MlflowClient

    run = MlflowClient().get_run(tracker_id)
    assert run.data.params["optim.lr"] == "0.01" and run.info.status == "FINISHED"
    return [metric.step for metric in MlflowClient().get_metric_history(tracker_id, "train/loss")]


def _steps_of_aim(folder, tracker_id):
    """It keeps one value of a step."""
    import aim

    run = aim.Run(tracker_id, repo=str(folder), system_tracking_interval=None)
    assert run["config"]["optim.lr"] == 0.01 and run["summary"]["iterations"] == 12
    (losses,) = [metric for metric in run.metrics() if metric.name == "train/loss"]
    return range(1, len(losses.values.sparse_list()[1]) + 1)


_STEPS = {"wandb": _steps_of_wandb, "mlflow": _steps_of_mlflow, "aim": _steps_of_aim}


@pytest.mark.parametrize("package", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_before_training(package, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(UserError, match=f"asks for {package}, which is not installed. Run `pip install {package}`"):
        contract_runs.make_run(tmp_path, "eager", f"train.writers=[console,{package}]")
    assert not (tmp_path / "config.yaml").exists()


class MyWriter(Writer):
    def __init__(self, run_info, word="no"):
        self.info, self.word, self.calls = run_info, word, []

    def begin(self, start_iter=0):
        self.calls.append("begin")

    def write(self, record):
        self.calls.append(record.iter)

    def write_summary(self, summary):
        self.calls.append(summary["status"])

    def close(self):
        self.calls.append("close")


def test_a_writer_of_the_user_knows_its_run(mode, tmp_path):
    is_async = "true" if mode == "graph" else "false"
    writers = "train.writers=[{_target_: test_contract_writers.MyWriter, word: yes}]"
    run = contract_runs.train(tmp_path, mode, writers, f"train.async_write_metrics={is_async}")
    hook = next(hook for hook in run.trainer.hooks if isinstance(hook, WriterHook))
    writer = getattr(hook._writers[0], "_writer", hook._writers[0])
    assert list(dict.fromkeys(writer.calls)) == ["begin", *range(1, 9), "finished", "close"] and writer.word == "yes"
    assert (writer.info.output_dir, writer.info.run_id) == (tmp_path, run.folder.run_id)
    assert writer.info.name == tmp_path.name and writer.info.config["train.train_iter"] == 8
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_writer_that_fails_ends_the_run_and_the_summary_says_so(mode, tmp_path):
    class Failing(MyWriter):
        def write(self, record):
            if record.iter == 3:
                raise OSError("disk full")

    run = contract_runs.make_run(tmp_path, mode, "train.writers=[jsonl]")
    failing = Failing(None)
    next(hook for hook in run.trainer.hooks if isinstance(hook, WriterHook))._writers.append(failing)
    with pytest.raises(OSError, match="disk full"):
        run.train()
    assert failing.calls == ["begin", "failed", "close"]
    assert [line["iter"] for line in jobs.read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_old_switch_takes_tensorboard_out(enabled, tmp_path):
    run = contract_runs.make_run(tmp_path, "eager", f"train.tensorboard.enabled={enabled}")
    assert any(isinstance(writer, TensorBoardWriter) for writer in run.build_writers()) == enabled


@pytest.mark.parametrize(
    ("writers", "told"),
    [
        ("[wandbb]", "train.writers names 'wandbb': expected console, jsonl, .* Did you mean wandb"),
        ("[csv,csv]", "train.writers names csv twice"),
        ("[3]", r"train.writers\[0\] names no _target_"),
        ("[{_target_: fractions.Fraction}]", r"train.writers\[0\] is a Fraction, not a writer"),
        ("csv", "train.writers=csv: expected a list"),
    ],
)
def test_what_is_no_writer_is_refused(writers, told, tmp_path):
    with pytest.raises(UserError, match=told):
        contract_runs.make_run(tmp_path, "eager", f"train.writers={writers}")


def test_every_name_of_the_schema_has_its_writer():
    assert tuple(_WRITERS) == schema.WRITERS
