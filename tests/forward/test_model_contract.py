"""The contract of forward, and the errors that explain it."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from toy import optimizer_of, trainer_of

from libai.forward.contract import ModelContractError, as_batch_dict, as_tensor, read_losses


class Net(nn.Module):
    def forward(self, x, y=None):
        return None


class Anything(nn.Module):
    def forward(self, **batch):
        return None


SCALAR, VECTOR = flow.tensor(2.0), flow.ones(3)


@pytest.mark.parametrize(
    "outputs, names",
    [
        (SCALAR, ["loss"]),
        ({"losses": SCALAR}, ["loss"]),
        ({"cls": SCALAR, "box": SCALAR}, ["cls", "box"]),
        ({"loss": SCALAR}, ["loss"]),
    ],
)
def test_one_loss_or_a_dict_of_losses_is_enough(outputs, names):
    losses, metrics = read_losses(outputs, Net())
    assert list(losses) == names and metrics == {}


def test_a_metric_among_losses_is_refused():
    outputs = {"cls": flow.tensor(2.0, requires_grad=True), "accuracy": SCALAR}
    with pytest.raises(
        ModelContractError, match=r"\['accuracy'\] depend on no parameter.*\"metrics\""
    ):
        read_losses(outputs, Net())


@pytest.mark.parametrize(
    "names, counted",
    [(("loss_a", "error"), "error"), (("one", "other"), ""), (("loss_a", "b_loss"), "")],
)
def test_losses_that_mmengine_would_not_add_are_named_once(names, counted, mode, caplog):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return dict.fromkeys(names, (self.layer(x) ** 2).mean())

    Flat.__name__ = f"Flat_{mode}"  # each warning is logged once in a process
    model = Flat()
    batches = [{"x": np.ones((2, 4), "float32")}]
    trainer_of(mode, model, batches, optimizer_of("sgd", model)).train(0, 3)
    told = [text for text in caplog.messages if "added to the loss" in text]
    assert len(told) == bool(counted)
    assert not counted or f"also {counted}. To only log a value, return it as a metric" in told[0]


@pytest.mark.parametrize(
    "outputs, found",
    [
        (None, "None"),
        (VECTOR, r"a tensor of shape \(3,\)"),
        ((SCALAR, SCALAR), "a tuple"),
        (
            {"logits": VECTOR, "loss": SCALAR},
            r"\{'logits': a tensor of shape \(3,\), 'loss': a tensor of shape \(\)\}",
        ),
        ({"losses": VECTOR}, r"\{'losses': a tensor of shape \(3,\)\}"),
        ({"losses": {}}, r"\{'losses': \{\}\}"),
        ({"losses": None}, r"\{'losses': None\}"),
        ({"losses": {"cls": 1.5}}, r"\{'losses': \{'cls': a float\}\}"),
        ({"losses": {"cls": SCALAR}, "metrics": SCALAR}, r"'metrics': a tensor of shape \(\)\}"),
        ({"losses": {"cls": SCALAR}, "metrics": {"n": 3}}, r"'metrics': \{'n': a int\}\}"),
    ],
)
def test_an_invalid_loss_is_explained_with_the_correct_code(outputs, found):
    with pytest.raises(
        ModelContractError,
        match=f"^Net.forward returned .*{found}, which .*return .*losses.*metrics",
    ):
        read_losses(outputs, Net())


def test_batches_become_keyword_arguments():
    batch = {"x": 1}
    assert as_batch_dict(batch, Net()) is batch
    assert as_batch_dict((1, 2), Net()) == {"x": 1, "y": 2}
    assert as_batch_dict([1], Net()) == {"x": 1}
    assert as_batch_dict(VECTOR, Net())["x"] is VECTOR
    assert as_batch_dict({"whatever": 1}, Anything()) == {"whatever": 1}


def test_a_key_that_forward_does_not_take_is_named():
    with pytest.raises(
        ModelContractError, match=r"\['image', 'x'\], but Net.forward takes \['x', 'y'\]: .*'image'"
    ):
        as_batch_dict({"x": 1, "image": 2}, Net())


def test_too_many_items_are_refused_with_their_number():
    with pytest.raises(
        ModelContractError,
        match=r"batch has length 3, but Net.forward takes \['x', 'y'\]: too many",
    ):
        as_batch_dict((1, 2, 3), Net())


def test_a_number_in_a_batch_becomes_a_0_dim_tensor():
    assert as_tensor(np.float32(2.0), "x").ndim == as_tensor(np.array(2.0), "x").ndim == 0
    assert (
        as_tensor([1.5, 2.0], "x").dtype is flow.float32
        and as_tensor(np.zeros(2), "x").dtype is flow.float64
    )
