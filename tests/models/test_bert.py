"""BERT and the dataset that masks its tokens."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from refusals import refused

from libai.data import MaskedTokens

MASK = 256


class Tokens:
    """1000 windows of 64 byte tokens, without batch reads."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        tokens = np.random.RandomState(index).randint(0, MASK, 64)
        return {"input_ids": tokens, "labels": np.roll(tokens, -1)}


@pytest.fixture
def masked():
    return MaskedTokens(Tokens(), MASK, seed=4)


def test_masking_keeps_its_shares(masked):
    original = np.stack([masked.dataset[i]["input_ids"] for i in range(1000)])
    batch = masked.get_batch(np.arange(1000))
    chosen = batch["labels"] != -100
    assert_array_equal(batch["labels"][chosen], original[chosen])
    assert_array_equal(batch["input_ids"][~chosen], original[~chosen])
    # 64,000 positions: 5 standard errors of each share
    assert chosen.mean() == pytest.approx(0.15, abs=0.008)
    assert (batch["input_ids"][chosen] == MASK).mean() == pytest.approx(0.8, abs=0.025)
    kept = (batch["input_ids"][chosen] == original[chosen]).mean()
    assert kept == pytest.approx(0.1 + 0.1 / 256, abs=0.02)
    assert batch["input_ids"].max() == MASK and batch["input_ids"].min() == 0


def test_impossible_share_is_refused():
    with refused(r"mask_prob=15.*0 < mask_prob < 1"):
        MaskedTokens(Tokens(), MASK, mask_prob=15)
