"""Windows of tokens: which, of what type, and what is left out."""

import numpy as np
import pytest

from libai.data import DataError, TokenDataset, prepare_tokens


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(20)))
    return prepare_tokens(tmp_path / "text", validation_fraction=0, cache_dir=tmp_path / "cache")


def test_labels_are_the_inputs_one_token_further(folder):
    sample = TokenDataset(folder, 6)[1]
    assert sample["input_ids"].tolist() == [6, 7, 8, 9, 10, 11]
    assert sample["labels"].tolist() == [7, 8, 9, 10, 11, 12]


def test_every_token_is_predicted_at_most_once(folder):
    dataset = TokenDataset(folder, 6)
    labels = dataset.get_batch(np.arange(len(dataset)))["labels"]
    # 20 bytes and the end-of-document token: three windows of 6 labels, the last two tokens are left out.
    assert labels.reshape(-1).tolist() == list(range(1, 19))


def test_a_batch_equals_its_samples(folder):
    dataset = TokenDataset(folder, 4, stride=1)
    indices = np.array([3, 0, 16, 3])
    batch = dataset.get_batch(indices)
    for key, rows in batch.items():
        assert rows.dtype == np.int64 and rows.flags.c_contiguous
        assert rows.tolist() == [dataset[i][key].tolist() for i in indices]


def test_overlapping_windows(folder):
    dataset = TokenDataset(folder, 4, stride=2)
    assert len(dataset) == 9
    assert dataset[8]["labels"].tolist() == [17, 18, 19, 256]


def test_the_whole_text_fits_one_window(folder):
    assert len(TokenDataset(folder, 20)) == 1
    with pytest.raises(DataError, match="needs windows of 22 tokens, but the train split of .* has 21 tokens"):
        TokenDataset(folder, 21)


def test_vocabulary_and_tokenizer_come_with_the_folder(folder):
    dataset = TokenDataset(str(folder), 4)
    assert dataset.vocab_size == 257
    assert dataset.tokenizer.encode("a") == [97]


def test_windows_share_the_memory_of_the_file(folder):
    dataset = TokenDataset(folder, 4)
    assert np.shares_memory(dataset.tokens, dataset._windows)


@pytest.mark.parametrize("options", [{"sequence_length": 0}, {"sequence_length": 4, "stride": 0}])
def test_lengths_below_one_are_refused(folder, options):
    with pytest.raises(DataError, match="at least 1"):
        TokenDataset(folder, **options)
