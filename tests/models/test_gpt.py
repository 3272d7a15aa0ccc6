"""GPT: its loss, its causality and its tied head.

`tests/hf` compares its logits with those of `transformers`.
"""

import numpy as np
import oneflow as flow
import pytest
from refusals import refused

from libai.models import GPT

VOCABULARY, LENGTH = 11, 7


@pytest.fixture
def model():
    """A tiny GPT whose weights are large enough for every part to matter."""
    flow.manual_seed(3)
    gpt = GPT(VOCABULARY, LENGTH, hidden_size=12, num_layers=2, num_heads=3)
    random = np.random.RandomState(0)
    for parameter in gpt.parameters():
        noise = random.randn(*parameter.shape).astype(np.float32)
        parameter.data.copy_(flow.tensor(parameter.numpy() + 0.3 * noise))
    return gpt


@pytest.fixture
def input_ids():
    return np.random.RandomState(1).randint(0, VOCABULARY, (2, LENGTH))


def test_loss_is_the_mean_over_counted_labels(model, input_ids):
    labels = np.roll(input_ids, -1, axis=1)
    labels[0, 2:] = -100
    logits = model(flow.tensor(input_ids))["logits"].numpy().astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.mean([log_probabilities[i][labels[i]] for i in zip(*np.nonzero(labels != -100))])
    loss = model(flow.tensor(input_ids), flow.tensor(labels))["losses"]["lm"].item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert model.num_loss_items(flow.tensor(input_ids), flow.tensor(labels)).item() == np.sum(
        labels != -100
    )
    assert model.num_loss_items(input_ids, labels) == np.sum(labels != -100)


def test_too_long_a_sequence_is_refused(model):
    with refused(r"sequences of 8 tokens, but the model has 7 positions.*Cut"):
        model(flow.zeros(1, LENGTH + 1, dtype=flow.int64))


def test_heads_of_unequal_width_are_refused():
    with refused(r"hidden_size=10 is not a multiple of num_heads=4.*8 or 12"):
        GPT(VOCABULARY, LENGTH, hidden_size=10, num_heads=4)
