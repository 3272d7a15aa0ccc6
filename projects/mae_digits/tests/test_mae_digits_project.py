"""The README is correct: the encoder is carried over, both modes give the same curve, and the
images are disjoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from project_runs import losses_in, train, train_in_both_modes

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from few_labels import few_labels  # noqa: E402

from libai.data import DigitsDataset  # noqa: E402

SHORT = ("train.train_iter=6", "train.checkpointer.period=6")


@pytest.mark.e2e
def test_both_modes_learn_alike_from_its_weights(tmp_path: Path) -> None:
    train(PROJECT / "mae_digits.py", tmp_path / "mae", *SHORT)
    weights = f"train.load_weight.path={tmp_path}/mae/checkpoints/last"
    losses = train_in_both_modes(PROJECT / "config.py", tmp_path, *SHORT, weights)
    train(PROJECT / "config.py", tmp_path / "scratch", *SHORT, "train.load_weight.path=")
    assert len(losses) == 6 and abs(losses[0] - losses_in(tmp_path / "scratch")[0]) > 1e-3


def test_few_images_of_each_digit_and_none_that_validates() -> None:
    few, validation = few_labels(3, seed=1), DigitsDataset("validation")
    assert np.bincount(few["labels"]).tolist() == [3] * 10
    assert not np.array_equal(few["images"], few_labels(3, seed=2)["images"])
    seen = {image.tobytes() for image in few["images"]}
    assert len(seen) == 30 and not seen & {image.tobytes() for image in validation.images}
