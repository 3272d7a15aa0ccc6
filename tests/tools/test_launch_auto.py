"""PROCS=auto: which numbers are tried, what they keep, which is taken, and what cannot be measured."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from libai.cli import auto as launch_auto
from libai.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

FACTS = {"device": "cpu", "global_batch_size": 24, "num_accumulation_steps": 2}
WORDS = ["train_net.py", "config.py", "auto", "optim.lr=0.1", "train.train_micro_batch_size=12", "--resume"]


def settle(seconds, facts=FACTS, cores=8):
    """The command that is chosen when processes take these seconds, and those that were measured."""
    measured = []

    def measure(words):
        measured.append(list(words))
        return seconds.get(int(words[2]))

    return launch_auto.resolve(WORDS, facts, cores, measure), measured


@pytest.mark.parametrize(
    ("cores", "batch", "accumulation", "expected"),
    [(8, 24, 1, [1, 2, 4, 8]), (8, 24, 2, [1, 2, 4]), (6, 8, 1, [1, 2]), (1, 8, 1, [1]), (4, 7, 1, [1])],
)
def test_processes_divide_cores_and_batch(cores, batch, accumulation, expected):
    assert launch_auto.candidates(cores, batch, accumulation) == expected


def test_the_fastest_is_taken_and_keeps_the_global_batch(capsys):
    command, measured = settle({1: 1.0, 2: 0.6, 4: 0.8})
    batch = ["train.train_micro_batch_size=null", "train.global_batch_size=24", "train.num_accumulation_steps=2"]
    assert command == ["train_net.py", "config.py", "2", "optim.lr=0.1", "--resume", *batch]
    assert measured[0] == ["train_net.py", "config.py", "1", "optim.lr=0.1", "train.train_micro_batch_size=12"]
    assert measured[1] == ["train_net.py", "config.py", "2", "optim.lr=0.1", *batch]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "launch: auto: 1 process, 8 threads each: 1.0000 s per step"
    assert len(said) == 4 and said[-1] == f"launch: auto: chosen: 2 processes, with {' '.join(batch)}"


def test_one_process_stays_as_it_was_asked_for():
    command, _ = settle({1: 0.5, 2: 0.6, 4: 0.8})
    assert command == [*WORDS[:2], "1", *WORDS[3:]]


def test_of_nearly_equal_ones_the_smallest_is_taken():
    assert settle({1: 1.0, 2: 0.96, 4: 0.97})[0][2] == "1"
    assert settle({1: 1.0, 2: 0.72, 4: 0.7})[0][2] == "2"


def test_what_fails_is_passed_over(capsys):
    assert settle({4: 0.9})[0][2] == "4"
    assert "launch: auto: 2 processes, 4 threads each: failed" in capsys.readouterr().err


def test_nothing_measured_is_said_in_one_line():
    with pytest.raises(UserError, match=r"no trial gave a time \(1, 2, 4 processes were tried\)"):
        settle({})


def test_a_gpu_is_not_for_it():
    with pytest.raises(UserError, match=r"train\.device=cuda"):
        settle({1: 1.0}, {**FACTS, "device": "cuda"})


def train(*words, **environment):
    command = ["bash", str(ROOT / "tools/train.sh"), *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("file", "environment", "expected"),
    [
        ("tools/plan.py", {}, "measures tools/train_net.py on one machine, and FILE is tools/plan.py. Name a number."),
        ("tools/train_net.py", {"NODE": "2", "NODE_RANK": "0", "ADDR": "192.0.2.1"}, "error: "),
    ],
)
def test_what_cannot_be_measured_is_a_mistake_with_one_line(file, environment, expected):
    done = train(file, "configs/mlp_digits.py", "auto", **environment)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and expected in done.stderr


@pytest.mark.slow
def test_a_run_is_measured_and_trained(tmp_path):
    small = ["train.train_iter=4", f"train.output_dir={tmp_path / 'out'}", "train.evaluation.enabled=false"]
    done = train("tools/train_net.py", "configs/mlp_digits.py", "auto", *small, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("launch: auto")]
    assert lines[0].endswith(" s per step") and "chosen" in lines[-1]
    assert (tmp_path / "out" / "summary.json").exists()
