"""A model whose losses average over different counts: micro-batches and ranks together equal one large batch."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
import toy

from libai.evaluation import MeanLossEvaluator
from libai.models import BERT

LENGTH, VOCABULARY = 6, 20


def data(iterations, size=8):
    """Batches whose first samples have one label that counts, the last ones all."""
    rng = np.random.RandomState(0)
    made = []
    for _ in range(iterations):
        ids = rng.randint(0, VOCABULARY, (size, LENGTH))
        labels = ids.copy()
        labels[: size // 2, 1:] = -100
        made.append({"input_ids": ids, "labels": labels, "next_sentence_labels": rng.randint(0, 2, size)})
    return made


def bert():
    flow.manual_seed(1)
    return BERT(VOCABULARY, LENGTH, 8, 1, 2, predicts_next_sentence=True, dropout=0.0)


def train(mode, batches, steps):
    model = bert()
    parts = [part for batch in batches for part in toy.split(batch, steps)]
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    trainer = toy.trainer_of(mode, model, parts, optimizer, num_accumulation_steps=steps)
    losses = toy.record_losses(trainer)
    trainer.train(0, len(batches))
    numbers = trainer.fetch_metrics()
    return losses, numbers, [parameter.numpy() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def expected():
    return train("eager", data(2), 1)


@pytest.mark.parametrize("steps", [2])
def test_micro_batches_of_two_losses_equal_one_batch(mode, steps, expected):
    losses, numbers, weights = train(mode, data(2), steps)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
    for name in ("train/mlm", "train/nsp"):
        np.testing.assert_allclose(numbers[name], expected[1][name], rtol=1e-5)
    for found, right in zip(weights, expected[2]):
        np.testing.assert_allclose(found, right, atol=1e-6)


def test_an_evaluation_of_two_losses_does_not_depend_on_its_batches(mode):
    model = bert()
    batch = data(1)[0]
    trainer = toy.trainer_of(mode, model, [], flow.optim.SGD(model.parameters(), lr=0.1))
    one, two = (trainer.evaluate(toy.split(batch, n), {"loss": MeanLossEvaluator()}) for n in (1, 2))
    assert one.keys() == {"eval/val/loss", "eval/val/mlm", "eval/val/nsp"}
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-5)
