"""Masking, sentence order and blends give the expected samples, equal for every layout."""

import numpy as np
import pytest

from libai.data import BlendedDataset, DataError, MaskedTokens, SentenceOrder, build_train_loader
from libai.data.windows import TokenWindows

CLS, SEP, PAD, MASK, STOP = 900, 901, 902, 903, 7
LENGTHS = [40, 3, 1, 17, 2, 90]


@pytest.fixture
def windows():
    """Six documents; the tokens of the second are 1000 + position, and so on; some are full
    stops.
    """
    documents = [np.arange(length) + 1000 * (i + 1) for i, length in enumerate(LENGTHS)]
    documents[0][[9, 22]] = STOP
    return TokenWindows(np.concatenate(documents), np.cumsum([0, *LENGTHS]), 8, "documents")


def pairs(windows, **options):
    return SentenceOrder(windows, 16, cls_token=CLS, sep_token=SEP, pad_token=PAD, **options)


def test_pairs_are_two_parts_of_one_document_in_one_of_two_orders(windows):
    dataset = pairs(windows)
    assert len(dataset) == 3 + 1 + 0 + 2 + 1 + 7, (
        "pieces of 13, and what remains if it is 2 or more"
    )
    batch = dataset.get_batch(np.arange(len(dataset)))
    seen = []
    for tokens, kinds, mask, swapped in zip(*(batch[key].tolist() for key in batch)):
        length = sum(mask)
        first, second = tokens[1 : tokens.index(SEP)], tokens[tokens.index(SEP) + 1 : length - 1]
        assert (
            tokens == [CLS, *first, SEP, *second, SEP, *[PAD] * (16 - length)] and first and second
        )
        assert kinds == [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * (16 - length)
        assert mask == [True] * length + [False] * (16 - length)
        seen += second + first if swapped else first + second
    expected = [token for token in windows.tokens.tolist() if token not in (1039, 3000)]
    assert seen == expected, "all but a piece of one token and a document of one"
    assert 0.2 < np.mean(batch["next_sentence_labels"]) < 0.8


def test_an_end_of_document_token_is_left_out(windows):
    tokens = pairs(windows, end_of_document=STOP).get_batch(np.arange(12))["input_ids"]
    assert not np.isin(windows.tokens[np.cumsum(LENGTHS) - 1], tokens).any()
    with pytest.raises(DataError, match="5 <= sequence_length"):
        SentenceOrder(windows, 4, cls_token=CLS, sep_token=SEP, pad_token=PAD)


def restored(batch):
    return np.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])


def test_masks_are_new_in_every_epoch_and_never_on_special_tokens(windows):
    order = pairs(windows)
    dataset = MaskedTokens(order, MASK, 0.3, special_tokens=[CLS, SEP, PAD])
    loader = build_train_loader(dataset, micro_batch_size=len(dataset), shuffle=False, seed=3)
    first, second = next(loader), next(loader)
    expected = order.get_batch(np.arange(len(order)))
    for batch in (first, second):
        assert np.array_equal(restored(batch), expected["input_ids"])
        assert np.array_equal(batch["next_sentence_labels"], expected["next_sentence_labels"])
        assert (
            not np.isin(batch["labels"], [CLS, SEP, PAD]).any()
            and (batch["input_ids"] == MASK).any()
        )
    assert not np.array_equal(first["labels"], second["labels"])
    loader.load_state_dict({"consumed_samples": len(dataset)})
    assert np.array_equal(next(loader)["labels"], second["labels"]), "a resumed run repeats them"


def test_a_blend_has_the_shares_of_its_weights_everywhere():
    small, large = {"x": np.arange(10)}, {"x": np.arange(100, 290)}
    blend = BlendedDataset([small, large], [1, 3])
    found = blend.get_batch(np.arange(200))["x"]
    is_small = found < 100
    assert len(blend) == 200 and np.array_equal(found[is_small], np.tile(np.arange(10), 5))
    assert np.array_equal(found[~is_small], np.arange(100, 250))
    assert all(part.sum() in (2, 3) for part in is_small.reshape(20, 10))
    assert np.array_equal(blend.get_batch(np.array([7, 3, 7]))["x"], found[[7, 3, 7]])


@pytest.mark.parametrize("weights", [[1], [1, float("nan")], [1, 0]])
def test_impossible_blends_are_refused(weights):
    with pytest.raises(DataError, match="each dataset needs a number above 0"):
        BlendedDataset([{"x": np.arange(3)}, {"x": np.arange(3)}], weights)


def test_blends_of_different_shapes_or_of_changing_datasets_are_refused(windows):
    with pytest.raises(DataError, match="samples of different shapes or keys"):
        BlendedDataset([{"x": np.zeros((4, 2))}, {"x": np.zeros((4, 3))}], [1, 1]).get_batch(
            np.arange(4)
        )
    with pytest.raises(DataError, match="wrap the blend in MaskedTokens"):
        BlendedDataset([MaskedTokens(windows, MASK)], [1])
