"""T5: the positions that its decoder sees, and its labels.

`tests/hf` compares it with `transformers`.
"""

import numpy as np
import oneflow as flow
import pytest
from refusals import refused

from libai.models import T5

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
    with refused("neither labels nor decoder_input_ids"):
        model(flow.tensor(TEXT))
    with refused("sequences of 13 tokens"):
        model(flow.zeros(1, 13, dtype=flow.int64), flow.tensor(TARGET[:1]))
