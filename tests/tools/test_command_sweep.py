"""`libai sweep`: which runs there are, what is refused before the first, and what the end says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import jobs
import pytest

from libai.cli.commands.runs import sweep
from libai.utils.errors import UserError


def test_values_are_combined_in_hydras_grammar():
    words = ["optim.lr=1e-3,3e-3", "model.width=range(1,4,2)", "train.seed=3", "train.name='a,b'", "train.list=[1,2]"]
    found = sweep.combinations_of(words)
    assert [values for values, _ in found] == [
        {"optim.lr": lr, "model.width": width} for lr in ("0.001", "0.003") for width in ("1", "3")
    ]
    assert all(fixed == ["train.seed=3", "train.name='a,b'", "train.list=[1,2]"] for _, fixed in found)


def test_folders_have_names_that_differ():
    values = [{"a": "1/2"}, {"a": "1_2"}, {"a": "x" * 300}, {"a": "x" * 301}, {"a.b": "[1, 2]"}]
    names = [sweep.name_of(each) for each in values]
    assert len(set(names)) == 5 and names[1] == "a=1_2"
    assert all(re.fullmatch(r"[\w=,.+-]{1,130}", name) for name in names)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["mlp_digits"], "no setting has several values"),
        (["mlp_digits", "optim.lr=interval(0,1)"], "it has no end of values"),
        (["mlp_digits", "optim.lr=1e-3,red"], "optim.lr=red: optim.lr=red: expected a number"),
        (["mlp_digits", "optim.lrr=1,2"], "optim.lrr=1: optim.lrr: no such setting. Did you mean optim.lr?"),
        (["mlp_digits", "train.seed=1,2", "train.log_period=-1"], "train.log_period"),
        (["mlp_digits", "train.seed=1,2", "--fast-dev-rum"], "Did you mean --fast-dev-run?"),
        (["mlp_digits", "train.seed=1,2", "--jobs", "0"], "--jobs 0: it must be at least 1"),
        (["mlp_digits", "train.seed=1,2", "-n", "0"], "-n 0: it must be the number of processes"),
        (["mlp_digits", "train.seed=1,2", "--resume"], "--resume: a sweep gives each run a folder"),
        (["mlp_digits", "train.output_dir=a,b"], "train.output_dir=a,b: a sweep gives each run a folder"),
        (["mlp_digits", "train.dist.tensor_parallel_size=1,2"], "train.dist.tensor_parallel_size=2: "),
        (["nowhere", "train.seed=1,2"], "CONFIG is nowhere, and there is no such file"),
    ],
)
def test_a_mistake_in_any_value_ends_it_before_the_first_run(words, text, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a run was started"))
    with pytest.raises(UserError, match=re.escape(text)):
        sweep.run([*words, "-o", str(tmp_path / "sweep")])


def test_runs_that_ended_otherwise_are_named(tmp_path, monkeypatch, capsys):
    """The trainings are stand-ins that leave the files of a finished and of a failed run."""

    def train(self, config, trial, processes):
        trial.folder.mkdir()
        (trial.folder / "config.yaml").write_text("{}")
        (trial.folder / "metrics.jsonl").write_text(
            json.dumps({"iter": 8, "train/loss": 0.5, "perf/step_ms": 1}) + "\n"
        )
        failed = trial.values["train.seed"] == "2"
        (trial.folder / "summary.json").write_text(json.dumps({"status": "failed" if failed else "finished"}))
        return int(failed)

    monkeypatch.setattr(sweep.Jobs, "train", train)
    words = ["mlp_digits", "train.seed=1,2", "-o", str(tmp_path)]
    assert sweep.run(words) == 1
    told = capsys.readouterr()
    said = told.out.splitlines()
    assert told.err == "training 2 runs, 1 at a time; each writes a .log beside its folder\n"
    assert said[:2] == ["finished: train.seed=1", "failed (1): train.seed=2"]
    assert [re.split(" {2,}", line) for line in said[2:6:2]] == [
        ["train.seed", "status", "train/loss"],
        ["1", "finished", "0.5"],
    ]
    assert said[-1] == f"failed: {tmp_path / 'train.seed=2'}.log"
    assert (tmp_path / "sweep.csv").read_text().splitlines()[2] == "2,failed,0.5"
    assert sweep.run([*words, "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["finished     train.seed=1", "failed       train.seed=2"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_continues(stop, tmp_path):
    (tmp_path / "config.py").write_text("import oneflow\nfrom configs.mlp_digits import *\n")
    command = [
        sys.executable,
        str(jobs.ROOT / "libai/__main__.py"),
        "sweep",
        str(tmp_path / "config.py"),
        "optim.lr=1e-3,1e-2",
    ]
    command += ["-o", str(tmp_path), "train.train_iter=4000", "train.log_period=100", "train.checkpointer.period=1000"]
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        metrics = tmp_path / "optim.lr=0.001" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.exists() or not metrics.read_text():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        first.send_signal(stop)
        _, said = first.communicate(timeout=60)
        assert first.returncode == 130
        assert "stopping: the runs save and end" in said
    finally:
        first.kill()
    assert list((tmp_path / "optim.lr=0.001" / "checkpoints").glob("iter_*")), "the run that was stopped has saved"
    assert not (tmp_path / "optim.lr=0.01").exists()
    second = jobs.run(command, timeout=250)
    assert second.returncode == 0, second
    rows = (tmp_path / "sweep.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows[1:]] == [["0.001", "finished"], ["0.01", "finished"]]
    assert "resumed" in (tmp_path / "optim.lr=0.001.log").read_text()
