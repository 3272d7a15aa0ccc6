"""The README is correct: the splits share no text, and both modes give the same curve from the
published weights.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import jobs
import numpy as np
import oneflow as flow
import pytest
from project_runs import train_in_both_modes

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from classifier import TextClassifier  # noqa: E402
from texts import LIBRARIES, TEXTS_PER_LIBRARY, texts  # noqa: E402

NEEDS_PACKAGES = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("all_minilm_l6_v2", "sklearn", "scipy")),
    reason="a package is not installed; see requirements/pretrained.txt",
)
SHORT = (
    *(
        "train.train_iter=3",
        "train.train_epoch=0",
        "train.train_micro_batch_size=4",
    ),
    *("train.evaluation.enabled=false", "train.checkpointer.enabled=false"),
)


@pytest.mark.pretrained
@pytest.mark.slow
@NEEDS_PACKAGES
def test_both_modes_fine_tune_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(jobs.ROOT)  # the config looks for its weights there
    losses = train_in_both_modes(PROJECT / "config.py", tmp_path, *SHORT)
    # the loss of a new head, whose weights are zero
    assert losses[0] == pytest.approx(np.log(len(LIBRARIES)), rel=1e-5)
    assert losses[1] != losses[0]


@pytest.mark.pretrained
@pytest.mark.e2e
@NEEDS_PACKAGES
def test_no_text_is_in_two_splits() -> None:
    splits = [{text for text, _ in pairs} for pairs in texts().values()]
    assert sum(map(len, splits)) == len(set().union(*splits))
    assert len(texts()["test"]) >= 1150, "a standard error of accuracy of at most 0.015"
    for split, pairs in texts().items():
        counts = Counter(label for _, label in pairs)
        assert len(counts) == len(LIBRARIES) and max(counts.values()) == TEXTS_PER_LIBRARY[split]
        assert min(counts.values()) > 0.8 * max(counts.values()), (
            "no library is told by being frequent"
        )
        assert not any(name in text.lower() for text, _ in pairs for name in LIBRARIES)


def test_the_head_reads_scaled_embeddings() -> None:
    class Encoder(flow.nn.Module):
        def forward(
            self, input_ids: flow.Tensor, attention_mask: flow.Tensor
        ) -> dict[str, flow.Tensor]:
            return {"embeddings": input_ids.to(flow.float32)}

    model = TextClassifier(Encoder(), hidden_size=2, num_classes=3, scale=10.0).eval()
    with flow.no_grad():
        model.head.weight.copy_(flow.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    logits = model(flow.tensor([[0, 1], [1, 0]]), flow.ones(2, 2))["logits"]
    assert logits.numpy().tolist() == [[0.0, 10.0, 0.0], [10.0, 0.0, 0.0]]
