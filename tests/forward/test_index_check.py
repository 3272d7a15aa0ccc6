"""Ids and labels that are out of range end a run with one clear error, in both modes, before they
are used.
"""

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn
from oneflow.nn import functional as F
from toy import Classifier, trainer_of

from libai.evaluation import MeanLossEvaluator
from libai.forward.index_check import IndexOutOfRange
from libai.utils.errors import UserError

ROWS = 20


class Language(nn.Module):
    """A typical language model: forward shifts the labels by one and flattens them."""

    def __init__(self, ignored=7, **options):
        super().__init__()
        self.ignored = ignored
        self.tokens = nn.Embedding(ROWS, 8, **options)
        self.positions = nn.Embedding(6, 8)
        self.head = nn.Linear(8, ROWS)

    def forward(self, ids, labels):
        logits = self.head(self.tokens(ids) + self.positions(flow.arange(ids.shape[1])))
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, ROWS), labels[:, 1:].reshape(-1), ignore_index=self.ignored
        )
        return {"losses": {"lm": loss}}


class Lenient(nn.Module):
    """Limits ids before it looks them up, and never looks up its input `number`."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head, self.loss = (
            nn.Embedding(ROWS, 8),
            nn.Linear(8, 4),
            nn.CrossEntropyLoss(),
        )

    def forward(self, ids, number, labels):
        logits = (
            self.head(self.tokens(ids.clamp(0, ROWS - 1))) + number.to(flow.float32).mean() * 0.0
        )
        labels = labels.masked_fill(labels == 99, -100)
        return {"losses": {"cls": self.loss(logits, labels)}}


def language_batches(count):
    rng = np.random.default_rng(0)
    made = rng.integers(0, ROWS, (count, 8, 6))
    return [{"ids": ids, "labels": ids.copy()} for ids in made]


def trainer(mode, model, loader, **options):
    return trainer_of(mode, model, loader, flow.optim.SGD(model.parameters(), lr=0.01), **options)


def error_of(mode, model, batches, **options):
    """Train over the batches once and return the text of the error that names an index."""
    with pytest.raises(IndexOutOfRange) as caught:
        trainer(mode, model, batches, **options).train(0, len(batches))
    assert isinstance(caught.value, UserError)
    return str(caught.value)


@pytest.mark.parametrize("iteration, label", [(1, 4), (6, -1)])
def test_a_label_without_a_class_is_named(mode, iteration, label):
    batches = toy.batches(6, ignored=0.2)
    batches[iteration - 1]["y"][3] = label
    text = error_of(mode, Classifier(), batches)
    takes = (
        "cross entropy accepts 0 to 3, or -100 to ignore it. Correct the data, or enlarge the "
        "model."
    )
    assert text == f"iteration {iteration}: y[3] is {label}, but {takes}"


@pytest.mark.parametrize("iteration, token, options", [(1, -3, {}), (6, ROWS, {"padding_idx": 0})])
def test_an_id_without_a_row_is_named(mode, iteration, token, options):
    batches = language_batches(6)
    batches[iteration - 1]["ids"][3, 2] = token
    text = error_of(mode, Language(**options), batches)
    takes = f"the embedding tokens.weight accepts 0 to {ROWS - 1}."
    assert text.startswith(f"iteration {iteration}: ids[3, 2] is {token}, but {takes}")


def test_an_id_that_is_ignored_only_as_a_label_is_named(mode):
    batches = language_batches(6)
    batches[0]["labels"][0, 1] = batches[5]["ids"][3, 2] = -5
    assert error_of(mode, Language(ignored=-5), batches).startswith(
        "iteration 6: ids[3, 2] is -5, but "
    )


def test_labels_that_forward_moves_and_flattens_are_checked(mode):
    batches = language_batches(6)
    batches[5]["labels"][5, 1] = ROWS
    text = error_of(mode, Language(), batches)
    assert text.startswith(f"iteration 6: labels[5, 1] is {ROWS}, but cross entropy accepts 0 to ")
    assert "or 7 to ignore it" in text


class Unflattened(Language):
    """Passes its logits (batch, length, classes) to a cross entropy, which expects the classes on
    the second axis.
    """

    def forward(self, ids, labels):
        return {"losses": {"lm": F.cross_entropy(self.head(self.tokens(ids)), labels)}}


def test_logits_of_tokens_must_be_flattened(mode):
    with pytest.raises(
        UserError, match=r"got logits \(8, 6, 20\) for labels \(8, 6\).* write cross_entropy\("
    ):
        trainer(mode, Unflattened(), language_batches(1)).train(0, 1)


def test_values_that_forward_limits_or_never_looks_up_are_fine(mode):
    rng = np.random.default_rng(0)
    batches = [
        {
            "ids": rng.integers(-3, ROWS * i + 1, 8),
            "number": np.full(8, 1000 * i),
            "labels": rng.integers(0, 4, 8),
        }
        for i in range(1, 7)
    ]
    batches[4]["labels"][0] = 99
    trainer(mode, Lenient(), batches).train(0, 6)


@pytest.mark.e2e
@pytest.mark.parametrize("steps", [1, 2])
def test_ids_are_checked_with_accumulation_and_in_tensors_of_the_loader(mode, steps):
    batches = toy.batches(6)
    batches[5]["y"][0] = 4
    loader = [{name: flow.tensor(array) for name, array in batch.items()} for batch in batches]
    text = error_of(mode, Classifier(), loader, num_accumulation_steps=steps)
    found = "y[0] is 4" if steps == 1 else "y[0] of micro-batch 2 is 4"
    assert text.startswith(f"iteration {6 // steps}: {found}, but ")


@pytest.mark.e2e
@pytest.mark.parametrize("has_trained, number", [(True, 1), (False, 3)])
def test_evaluation_names_its_batch(mode, has_trained, number):
    subject = trainer(mode, Classifier(), toy.batches(2))
    if has_trained:
        subject.train(0, 2)
    batches = toy.batches(3)
    batches[number - 1]["y"][1] = 4
    with pytest.raises(
        IndexOutOfRange, match=f"^batch {number} of the evaluation dataset 'val': y.1. is 4"
    ):
        subject.evaluate(batches, {"loss": MeanLossEvaluator()})
    batches[number - 1]["y"][1] = 3
    subject.evaluate(batches, {"loss": MeanLossEvaluator()})  # the trainer is still usable


def test_the_search_for_parameters_without_gradient_is_also_checked(mode):
    batches = language_batches(1)
    batches[0]["ids"][0, 0] = -1  # OneFlow's own check would end the process
    assert "ids[0, 0] is -1" in error_of(mode, Language(), batches, detect_anomalous_params=True)
