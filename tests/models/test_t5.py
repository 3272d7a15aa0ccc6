"""T5: the positions that its decoder sees, and its labels.

`tests/hf` compares it with `transformers`.
"""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from libai.models import T5
from libai.models.t5 import relative_buckets
from libai.utils.errors import UserError

RANDOM = np.random.default_rng(0)
TEXT, TARGET = RANDOM.integers(1, 40, (2, 10)), RANDOM.integers(1, 40, (2, 7))


@pytest.fixture(scope="module")
def model():
    flow.manual_seed(0)
    return T5(
        40,
        12,
        hidden_size=24,
        num_layers=1,
        num_heads=3,
        inner_size=32,
        num_buckets=8,
        max_distance=10,
    ).eval()


def logits(model, text, target, **more):
    given = {"input_ids": text, "decoder_input_ids": target, **more}
    return model(**{name: flow.tensor(array) for name, array in given.items()})["logits"].numpy()


def test_buckets_are_those_of_the_paper():
    """Of 8 buckets 2 in each direction are for distances 0 and 1, 2 for ranges up to 10 and
    beyond.
    """
    two_ways = relative_buckets(12, 8, 10, is_causal=False)
    assert two_ways[0].tolist() == [0, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7]
    assert two_ways[:, 0].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    causal = relative_buckets(12, 8, 10, is_causal=True)
    assert causal[0].tolist() == [0] * 12  # no key is behind its query
    assert causal[:, 0].tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 7, 7, 7]


def test_the_decoder_sees_earlier_targets_and_all_of_the_text(model):
    before = logits(model, TEXT, TARGET)
    later, last_of_text = TARGET.copy(), TEXT.copy()
    later[:, 4] = 0
    after = logits(model, TEXT, later)
    assert_array_equal(after[:, :4], before[:, :4])
    assert np.abs(after[:, 4:] - before[:, 4:]).max(axis=2).min() > 1e-4
    last_of_text[:, -1] = 0
    assert np.abs(logits(model, last_of_text, TARGET) - before).max(axis=2).min() > 1e-6


def test_padding_of_the_text_is_not_seen(model):
    mask = np.ones_like(TEXT)
    mask[:, 7:] = 0
    assert_allclose(
        logits(model, TEXT, TARGET, attention_mask=mask),
        logits(model, TEXT[:, :7], TARGET),
        rtol=0,
        atol=1e-6,
    )


def test_the_decoder_reads_the_labels_behind_the_start_token(model):
    labels = TARGET.copy()
    labels[:, -2:] = -100
    given = np.concatenate([np.zeros((2, 1), np.int64), TARGET[:, :-1]], axis=1)
    scores = logits(model, TEXT, given).astype(np.float64)
    log_probs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probs, TARGET[..., None], axis=2)[:, :-2].mean()
    loss = model(flow.tensor(TEXT), flow.tensor(labels))["losses"]["lm"]
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert model.num_loss_items(TEXT, labels) == 10


def test_mistakes_are_told(model):
    with pytest.raises(UserError, match="neither labels nor decoder_input_ids"):
        model(flow.tensor(TEXT))
    with pytest.raises(UserError, match="sequences of 13 tokens"):
        model(flow.zeros(1, 13, dtype=flow.int64), flow.tensor(TARGET[:1]))
