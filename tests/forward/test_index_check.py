"""Ids and labels that are out of range end a run with one clear error, in both modes, before they are used."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn
from oneflow.nn import functional as F
from oneflow.nn.functional import cross_entropy

from libai.evaluation import MeanLossEvaluator
from libai.forward.indices.check import IndexCheck, IndexOutOfRange
from libai.utils.errors import UserError

ROWS = 20


class Language(nn.Module):
    """A language model as many write it: the labels are moved by one and flattened in forward."""

    def __init__(self, **options):
        super().__init__()
        self.tokens = nn.Embedding(ROWS, 8, **options)
        self.positions = nn.Embedding(6, 8)
        self.head = nn.Linear(8, ROWS)

    def forward(self, ids, labels):
        logits = self.head(self.tokens(ids) + self.positions(flow.arange(ids.shape[1])))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, ROWS), labels[:, 1:].reshape(-1), ignore_index=7)
        return {"losses": {"lm": loss}}


class Columns(nn.Module):
    """One embedding per column of a table, with labels from 1 on and a loss that is kept as an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Embedding(50, 4), nn.Embedding(3, 4), nn.Linear(4, 5)
        self.criterion = cross_entropy

    def forward(self, table, labels):
        logits = self.head(self.first(table[:, 0]) + self.second(table[:, 1]))
        return {"losses": {"cls": self.criterion(logits, labels - 1)}}


class Lenient(nn.Module):
    """It looks ids up that it has limited before, and never its `number`."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head, self.loss = nn.Embedding(ROWS, 8), nn.Linear(8, 4), nn.CrossEntropyLoss()

    def forward(self, ids, number, labels):
        logits = self.head(self.tokens(ids.clamp(0, ROWS - 1))) + number.to(flow.float32).mean() * 0.0
        labels = labels.masked_fill(labels == 99, -100)
        return {"losses": {"cls": self.loss(logits, labels)}}


class Pixels(nn.Module):
    """Segmentation: labels of every pixel, 255 where nobody knows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 5, 1)
        self.loss = nn.CrossEntropyLoss(ignore_index=255)

    def forward(self, image, labels):
        return {"losses": {"pixels": self.loss(self.layer(image), labels.long())}}


def language_batches(count):
    rng = np.random.default_rng(0)
    made = rng.integers(0, ROWS, (count, 8, 6))
    return [{"ids": ids, "labels": ids.copy()} for ids in made]


def column_batches(count):
    rng = np.random.default_rng(0)
    return [
        {"table": np.stack([rng.integers(0, 50, 8), rng.integers(0, 3, 8)], 1), "labels": rng.integers(1, 6, 8)}
        for _ in range(count)
    ]


def pixel_batches(count):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, (count, 2, 4, 4)).astype(np.uint8)
    labels[:, :, 0] = 255
    return [{"image": rng.normal(size=(2, 1, 4, 4)).astype(np.float32), "labels": each} for each in labels]


def trainer(mode, model, loader, **options):
    return toy.trainer_of(mode, model, loader, flow.optim.SGD(model.parameters(), lr=0.01), **options)


def error_of(mode, model, batches, **options):
    """Train over the batches once; the text of the error that names an index."""
    with pytest.raises(IndexOutOfRange) as caught:
        trainer(mode, model, batches, **options).train(0, len(batches))
    assert isinstance(caught.value, UserError)
    return str(caught.value)


@pytest.mark.parametrize(("iteration", "label"), [(1, 4), (6, 10**9), (6, -1)])
def test_a_label_without_a_class_is_named(mode, iteration, label):
    batches = toy.batches(6, ignored=0.2)
    batches[iteration - 1]["y"][3] = label
    text = error_of(mode, toy.Classifier(), batches)
    assert text.startswith(f"iteration {iteration}: the input y holds {label} (sample 3, counted from 0), and ")
    assert "cross entropy has 4 classes: it takes 0 to 3, or -100 to ignore it." in text


@pytest.mark.parametrize(("iteration", "token", "options"), [(1, -3, {}), (6, ROWS, {}), (1, ROWS, {"padding_idx": 0})])
def test_an_id_without_a_row_is_named(mode, iteration, token, options):
    batches = language_batches(6)
    batches[iteration - 1]["ids"][3, 2] = token
    text = error_of(mode, Language(**options), batches)
    assert text.startswith(f"iteration {iteration}: the input ids holds {token} (sample 3, position 2, ")
    assert f"the embedding tokens.weight has {ROWS} rows: it takes 0 to {ROWS - 1}." in text


def test_labels_that_forward_moves_and_flattens_are_checked(mode):
    batches = language_batches(6)
    batches[5]["labels"][5, 1] = ROWS
    text = error_of(mode, Language(), batches)
    assert text.startswith(f"iteration 6: the input labels holds {ROWS} (sample 5, position 1,")
    assert "or 7 to ignore it" in text


def test_every_column_of_a_table_has_its_own_range(mode):
    batches = column_batches(6)
    batches[5]["table"][2, 1] = 3
    text = error_of(mode, Columns(), batches)
    assert text.startswith("iteration 6: the input table holds 3 (sample ")
    assert "the embedding second.weight has 3 rows" in text


@pytest.mark.parametrize(("label", "is_fine"), [(5, True), (0, False), (6, False)])
def test_labels_from_one_on_are_checked_as_forward_uses_them(mode, label, is_fine):
    batches = column_batches(6)
    batches[5]["labels"][2] = label
    if is_fine:
        trainer(mode, Columns(), batches).train(0, 6)
    else:
        assert "cross entropy has 5 classes" in error_of(mode, Columns(), batches)


@pytest.mark.parametrize(("label", "is_fine"), [(255, True), (200, False)])
def test_an_ignored_label_above_all_classes_hides_no_wrong_one(mode, label, is_fine):
    batches = pixel_batches(4)
    batches[3]["labels"][0, 1, 1] = label
    if is_fine:
        trainer(mode, Pixels(), batches).train(0, 4)
    else:
        text = error_of(mode, Pixels(), batches)
        assert text.startswith(f"iteration 4: the input labels holds {label} (sample 0, position 1, 1,")


def test_values_that_forward_limits_or_never_looks_up_are_fine(mode):
    rng = np.random.default_rng(0)
    batches = [
        {"ids": rng.integers(-3, ROWS * i + 1, 8), "number": np.full(8, 1000 * i), "labels": rng.integers(0, 4, 8)}
        for i in range(1, 7)
    ]
    batches[4]["labels"][0] = 99
    trainer(mode, Lenient(), batches).train(0, 6)


@pytest.mark.parametrize("steps", [1, 2])
def test_accumulation_and_tensors_of_the_loader(mode, steps):
    batches = toy.batches(6)
    batches[5]["y"][0] = 4
    loader = [{name: flow.tensor(array) for name, array in batch.items()} for batch in batches]
    text = error_of(mode, toy.Classifier(), loader, num_accumulation_steps=steps)
    assert text.startswith(f"iteration {6 // steps}: the input y holds 4 (")
    assert ("micro-batch 2 of 2" in text) == (steps == 2)


@pytest.mark.parametrize(("has_trained", "number"), [(True, 1), (False, 1), (False, 3)])
def test_evaluation_names_its_batch(mode, has_trained, number):
    subject = trainer(mode, toy.Classifier(), toy.batches(2))
    if has_trained:
        subject.train(0, 2)
    batches = toy.batches(3)
    batches[number - 1]["y"][1] = 4
    with pytest.raises(IndexOutOfRange, match=f"^batch {number} of the evaluation dataset 'val': the input y holds 4"):
        subject.evaluate(batches, {"loss": MeanLossEvaluator()})
    batches[number - 1]["y"][1] = 3
    subject.evaluate(batches, {"loss": MeanLossEvaluator()})  # it can go on


def test_a_remainder_that_a_graph_evaluates_eagerly_is_checked():
    batch = toy.batches(1)[0]
    batch["y"][0] = -1
    with pytest.raises(IndexOutOfRange, match="input y holds -1"):
        trainer("graph", toy.Classifier(), []).evaluate([(batch, True)], {"loss": MeanLossEvaluator()})


def test_the_search_for_parameters_without_gradient_is_checked_too(mode):
    batches = language_batches(1)
    batches[0]["ids"][0, 0] = -1  # OneFlow's own check would end the process
    assert "holds -1" in error_of(mode, Language(), batches, detect_anomalous_params=True)


def test_replaced_functions_are_put_back_and_rarely_replaced():
    model, originals = Lenient(), (F.cross_entropy, flow._C.gather, cross_entropy)
    check, watched = IndexCheck(model), 0
    for i in range(1000):
        ids = np.random.default_rng(i).integers(0, ROWS, 8)
        with (watch := check.watch([{"ids": ids, "number": np.full(8, i)}], lambda: "")):
            if type(watch).__name__ != "nullcontext":
                watched += 1
                assert F.cross_entropy is not originals[0]
                model.tokens(flow.from_numpy(ids))
        assert (F.cross_entropy, flow._C.gather, cross_entropy) == originals
    assert 2 <= watched < 30
