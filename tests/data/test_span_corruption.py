"""`SpanCorruption`: the removed spans can be restored, and all samples have one length."""

import numpy as np
import pytest

from libai.data import DataError, SampleRandom, SpanCorruption

SENTINELS = {"first_sentinel": 1000, "last_sentinel": 1031, "end_token": 999}


class Tokens:
    """Samples of 60 tokens, without batch reads."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return {"input_ids": np.random.default_rng(index).integers(0, 900, 60)}


def restored(sample):
    """Return the text: every sentinel of the input is replaced by the tokens that follow it in the
    labels.
    """
    *labels, end = sample["labels"].tolist()
    assert end == 999
    spans = {}
    for token in labels:
        if token >= 1000:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    assert list(spans) == [1031 - i for i in range(len(spans))] and all(spans.values())
    *inputs, end = sample["input_ids"].tolist()
    assert end == 999
    return [t for token in inputs for t in (spans[token] if token >= 1000 else [token])]


def test_a_visit_has_other_spans_of_the_same_texts():
    dataset = SpanCorruption(Tokens(), **SENTINELS)
    batch = dataset.get_batch(np.arange(50))
    visit = dataset.augment_batch(batch, SampleRandom(0, np.arange(1000, 1050)))
    assert (visit["labels"] != batch["labels"]).any(axis=1).all()
    for index in range(50):
        assert (
            restored({name: rows[index] for name, rows in visit.items()})
            == Tokens()[index]["input_ids"].tolist()
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"first_sentinel": 1030}, "60 tokens have 3 masked spans, but there are only 2 sentinels"),
        ({"noise_share": 1.5}, "noise_share=1.5.*0 < noise_share < 1"),
        ({"mean_span": 0.5}, "mean_span=0.5.*1 <= mean_span"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(DataError, match=message):
        SpanCorruption(Tokens(), **{**SENTINELS, **change})
