"""The README is correct: both modes give the same curve, and two ranks give the curve of one
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOT = PROJECT.parents[1]
sys.path.insert(0, str(PROJECT))

from sentences import build_dataset  # noqa: E402
from simcse import RetrievalEvaluator, SimCSE  # noqa: E402

from libai.launch.runtime import RENDEZVOUS_VARIABLES  # noqa: E402

SHORT = ("train.train_iter=4", "train.global_batch_size=16", "train.log_period=1")


def train(folder: Path, processes: int, *overrides: str) -> tuple[list[float], float]:
    """Train a short run and return the loss of each iteration and the final recall."""
    environment = {
        name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES
    }
    command = [sys.executable, "-m", "libai.launch", str(ROOT / "tools/train_net.py")]
    command += [
        str(PROJECT / "config.py"),
        str(processes),
        *SHORT,
        f"train.output_dir={folder}",
        *overrides,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line], lines[-1][
        "eval/val/recall"
    ]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    return train(tmp_path_factory.mktemp("eager") / "run", 1)


@pytest.mark.parametrize("processes, mode", [(1, "true"), (2, "false"), (2, "true")])
def test_the_curve_is_that_of_one_eager_process(
    processes: int, mode: str, eager: tuple[list[float], float], tmp_path: Path
) -> None:
    losses, recall = train(tmp_path / "run", processes, f"graph.enabled={mode}")
    np.testing.assert_allclose(losses, eager[0], rtol=1e-5)
    assert recall == pytest.approx(eager[1], abs=0.003), (
        "over the texts of all ranks; two of 678 may be near ties"
    )


def test_negatives_of_one_rank_would_be_seen(
    eager: tuple[list[float], float], tmp_path: Path
) -> None:
    losses, _ = train(tmp_path / "run", 2, "train.dist.batch_scope=rank")
    assert abs(losses[0] - eager[0][0]) > 0.1  # about log 16 and log 8


def test_the_loss_is_the_cross_entropy_of_finding_the_pair() -> None:
    flow.manual_seed(0)
    model = SimCSE(vocab_size=50, max_seq_length=6, hidden_size=8, num_layers=1, num_heads=2).eval()
    ids = flow.randint(1, 50, (5, 2, 6))
    outputs = model(ids, flow.ones_like(ids))
    pairs = outputs["embeddings"].numpy().astype(np.float64)
    scores = pairs[:, 0] @ pairs[:, 1].T / 0.05
    expected = (np.log(np.exp(scores).sum(axis=1)) - scores.diagonal()).mean()
    np.testing.assert_allclose(outputs["losses"]["contrastive"].numpy(), expected, rtol=1e-4)


def test_recall_counts_nearest_partners_over_all_batches() -> None:
    pairs = np.stack([np.eye(4), np.eye(4)[[0, 1, 3, 2]]], axis=1)  # two of four are found
    evaluator = RetrievalEvaluator()
    parts = [
        evaluator.process({}, {"embeddings": flow.tensor(pairs[rows])})
        for rows in (slice(3), slice(3, 4))
    ]
    assert evaluator.compute({"embeddings": parts[0]["embeddings"] + parts[1]["embeddings"]}) == {
        "recall": 0.5
    }


def test_splits_share_no_text_and_views_are_as_asked() -> None:
    train_rows, validation = (
        build_dataset(split, "halves")["input_ids"] for split in ("train", "validation")
    )
    assert len(train_rows) > 5 * len(validation) > 500
    same = build_dataset("validation", "same")["input_ids"]
    assert (same[:, 0] == same[:, 1]).all() and (validation[:, 0] != validation[:, 1]).any(
        axis=1
    ).mean() > 0.99
