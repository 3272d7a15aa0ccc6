"""Windows of tokens: their positions, their types, and the tokens that are dropped."""

import numpy as np
import pytest

from libai.data import DataError, TokenDataset, build_text_dataset


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(20)))
    options = {"validation_fraction": 0, "cache_dir": tmp_path / "cache"}
    return build_text_dataset(tmp_path / "text", sequence_length=4, **options).path


def test_every_token_is_predicted_at_most_once(folder):
    dataset = TokenDataset(folder, 6)
    labels = dataset.get_batch(np.arange(len(dataset)))["labels"]
    # 20 bytes and the end-of-document token: three windows of 6 labels, the last two tokens are
    # left out.
    assert labels.reshape(-1).tolist() == list(range(1, 19))


def test_the_whole_text_fits_one_window(folder):
    assert len(TokenDataset(folder, 20)) == 1
    with pytest.raises(
        DataError, match="needs windows of 22 tokens, but the train split of .* has 21 tokens"
    ):
        TokenDataset(folder, 21)
    with pytest.raises(DataError, match="sequence_length=0.*>= 1"):
        TokenDataset(folder, 0)
