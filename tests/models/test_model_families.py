"""The contract of every model family, checked with the tiny cases of tests/parity in both modes."""

import math
from fnmatch import fnmatchcase

import numpy as np
import oneflow as flow
import pytest
from families import IMAGES, LENGTH, TEXT, VOCAB, WIDTH
from oneflow import nn

from libai.models import GPT, T5, SwinV2, ViT

CASES = {**IMAGES, **TEXT}
del CASES["synchronized"]  # a ResNet
CLASSES = 4

each_family = pytest.mark.parametrize("name", CASES)


def build(name: str) -> nn.Module:
    flow.manual_seed(1)
    return CASES[name].model()


def batch_of(name):
    return {key: flow.tensor(array) for key, array in CASES[name].batches()[0].items()}


def training_loss(name, model):
    outputs = model(**batch_of(name))
    assert outputs.keys() <= {"losses", "metrics"}
    assert all(value.ndim == 0 for group in outputs.values() for value in group.values())
    (loss,) = outputs["losses"].values()
    return loss


def predict(model, batch):
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if isinstance(model, T5):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return model(**inputs)


@each_family
def test_first_loss_is_that_of_a_guess(name):
    loss = training_loss(name, build(name)).item()
    if name in TEXT:
        # a tied head starts with logits of variance 2/5, which cost half of that more than a guess;
        # twice as much is let through for the luck of one draw
        assert math.log(VOCAB) - 0.1 < loss < math.log(VOCAB) + 0.4
    else:
        assert loss == pytest.approx(math.log(CLASSES), rel=0.05)


@each_family
def test_gradient_reaches_every_parameter(name):
    model = build(name)
    training_loss(name, model).backward()
    without = [
        n for n, p in model.named_parameters() if p.grad is None or not np.any(p.grad.numpy())
    ]
    # adding one number to all scores of a query leaves its softmax unchanged: a key bias has no
    # gradient but rounding
    assert [name for name in without if not name.endswith("attention.k.bias")] == []


@each_family
def test_evaluation_gives_losses_and_prediction_gives_logits(name):
    model, batch = build(name).eval(), batch_of(name)
    outputs = model(**batch)
    assert outputs["losses"] and all(loss.ndim == 0 for loss in outputs["losses"].values())
    assert "metrics" not in outputs
    labels = tuple(batch["labels"].shape)
    logits = predict(model, batch)["logits"]
    assert tuple(logits.shape) == (*labels, VOCAB if name in TEXT else CLASSES)


@each_family
def test_plan_names_parameters_and_blocks_that_exist(name):
    model = build(name)
    parameters = dict(model.named_parameters())
    for pattern, axis in model.plan["split"].items():
        matches = [one for one in parameters if fnmatchcase(one, pattern)]
        assert matches, pattern
        assert all(axis < parameters[one].ndim for one in matches)
    assert isinstance(getattr(model, model.plan["blocks"]), nn.ModuleList)


@pytest.mark.parametrize(
    "name, build_with",
    [
        ("gpt", lambda p: GPT(VOCAB, LENGTH, WIDTH, 1, 4, dropout=p)),
        ("bert", lambda p: T5(VOCAB, LENGTH, hidden_size=WIDTH, num_layers=1, dropout=p)),
        ("vit", lambda p: ViT(8, 2, 1, CLASSES, 32, 1, 4, dropout=p)),
        ("swin", lambda p: SwinV2(8, 2, 1, CLASSES, WIDTH, (2, 1), (2, 2), 2, drop_path=p)),
    ],
)
def test_dropout_acts_in_training_and_not_in_evaluation(name, build_with):
    def loss(p, training):
        flow.manual_seed(1)
        model = build_with(p).train(training)
        return sum(value.item() for value in model(**batch_of(name))["losses"].values())

    assert loss(0.5, training=False) == loss(0.0, training=False)
    assert loss(0.5, training=True) != loss(0.0, training=True)
