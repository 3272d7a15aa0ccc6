"""The README is correct: the encoder is carried over, both modes give the same curve, and the
images are disjoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOT = PROJECT.parents[1]
sys.path.insert(0, str(PROJECT))

from few_labels import few_labels  # noqa: E402

from libai.data import DigitsDataset  # noqa: E402
from libai.launch.runtime import RENDEZVOUS_VARIABLES  # noqa: E402


def train(config: Path, folder: Path, *overrides: str) -> dict[int, float]:
    """Train a short run and return iteration -> loss."""
    environment = {
        name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES
    }
    command = [sys.executable, str(ROOT / "tools/train_net.py"), str(config), "train.train_iter=6"]
    command += ["train.log_period=1", f"train.output_dir={folder}", *overrides]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["iter"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mae") / "run"
    train(PROJECT / "mae_digits.py", folder, "train.checkpointer.period=6")
    return f"train.load_weight.path={folder}/checkpoints/last"


def test_both_modes_learn_alike_from_its_weights(encoder: str, tmp_path: Path) -> None:
    eager, graph, scratch = (
        list(train(PROJECT / "config.py", tmp_path / name, *words).values())
        for name, words in (
            ("eager", [encoder]),
            ("graph", [encoder, "graph.enabled=true"]),
            ("scratch", ["train.load_weight.path="]),
        )
    )
    np.testing.assert_allclose(graph, eager, rtol=1e-5)
    assert len(eager) == 6 and abs(eager[0] - scratch[0]) > 1e-3


def test_few_images_of_each_digit_and_none_that_validates() -> None:
    few, validation = few_labels(3, seed=1), DigitsDataset("validation")
    assert np.bincount(few["labels"]).tolist() == [3] * 10
    assert not np.array_equal(few["images"], few_labels(3, seed=2)["images"])
    seen = {image.tobytes() for image in few["images"]}
    assert len(seen) == 30 and not seen & {image.tobytes() for image in validation.images}
