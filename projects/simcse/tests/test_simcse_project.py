"""The README is correct: both modes give the same curve, and two ranks give the curve of one
process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jobs
import numpy as np
import oneflow as flow
import pytest
from project_runs import losses_in, train

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from sentences import build_dataset  # noqa: E402
from simcse import RetrievalEvaluator, SimCSE  # noqa: E402

CONFIG = PROJECT / "config.py"
SHORT = ("train.train_iter=3", "train.global_batch_size=16")
RECALL = "eval/val/recall"


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an eager run in one process."""
    folder = tmp_path_factory.mktemp("eager")
    train(CONFIG, folder, *SHORT)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs of two_ranks.py."""
    folder = tmp_path_factory.mktemp("two_ranks")
    script = Path(__file__).with_name("two_ranks.py")
    jobs.run_ranks(script, 2, CONFIG, folder, *SHORT, timeout=280)
    return folder


def assert_same_curve(found: Path, expected: Path) -> None:
    """Check that two runs have equal losses and an equal recall."""
    np.testing.assert_allclose(losses_in(found), losses_in(expected), rtol=1e-5)
    # over the texts of all ranks; two of 678 may be near ties
    recall = jobs.read_column(expected, RECALL)
    assert jobs.read_column(found, RECALL) == pytest.approx(recall, abs=0.003) and recall


@pytest.mark.e2e
def test_a_graph_has_the_curve_of_one_eager_process(eager: Path, tmp_path: Path) -> None:
    train(CONFIG, tmp_path, *SHORT, "graph.enabled=true")
    assert_same_curve(tmp_path, eager)


@pytest.mark.e2e
@pytest.mark.launch
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_two_ranks_have_the_curve_of_one_eager_process(
    two_ranks: Path, eager: Path, mode: str
) -> None:
    assert_same_curve(two_ranks / mode, eager)


@pytest.mark.e2e
@pytest.mark.launch
def test_negatives_of_one_rank_would_be_seen(two_ranks: Path, eager: Path) -> None:
    first = losses_in(two_ranks / "rank")[0]
    assert abs(first - losses_in(eager)[0]) > 0.1  # about log 16 and log 8


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


@pytest.mark.e2e
def test_splits_share_no_text_and_views_are_as_asked() -> None:
    train_rows, validation = (
        build_dataset(split, "halves")["input_ids"] for split in ("train", "validation")
    )
    assert len(train_rows) > 5 * len(validation) > 500
    same = build_dataset("validation", "same")["input_ids"]
    assert (same[:, 0] == same[:, 1]).all() and (validation[:, 0] != validation[:, 1]).any(
        axis=1
    ).mean() > 0.99
