"""Wrong gradients of OneFlow are found by differences of the loss, repaired, or refused at their
line.
"""

import logging
from contextlib import nullcontext

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from oneflow.nn import functional as F
from toy import batches, flat_weights, make_trainer

from libai.engine.rehearsal.gradient_judge import judge
from libai.engine.rehearsal.view_writes import WrongGradient
from libai.utils.errors import UserError

BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])

pytestmark = pytest.mark.e2e


class Planted(flow.autograd.Function):
    """The identity, whose gradient has a wrong factor."""

    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Planted.factor


Planted.__module__ = "libai.planted"  # the judge excuses Functions of users


class Own(Planted):
    """A user's function."""


class Net(nn.Module):
    """Three layers, with `change(h, s)` after the second."""

    def __init__(self, change):
        super().__init__()
        self.first, self.middle, self.side, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.change = [change]

    def forward(self, x, y):
        h = flow.tanh(self.middle(flow.tanh(self.first(x))))
        h = self.change[0](h, flow.tanh(self.side(x)))
        return {"losses": {"cls": F.cross_entropy(self.last(h)[:, :4], y)}}


def judged(change, seed=0):
    flow.manual_seed(seed)
    model = Net(change).train()
    batch = batches(1, seed=seed)[0]
    inputs = lambda: {key: flow.tensor(value) for key, value in batch.items()}  # noqa: E731
    return judge(model, inputs, nullcontext)


def view(h, s):
    h[:, :2].mul_(2)
    return h + s


def split_view(h, s):
    part, _ = flow.split(h, 4, 1)
    part *= 3
    return h + s


def view_item(h, s):
    h.view(-1)[3] = s[0, 0]
    return h


def diagonal(h, s):
    h.diagonal().copy_(s.sum(1))
    return h


def row(h, s):
    h.mul_(h[:1])
    return h + s


def old_view(h, s):
    part = h[:, :2]
    h.mul_(2)
    return flow.cat([part, s[:, 2:]], 1)


@BOTH
@pytest.mark.parametrize("change", [view, split_view, view_item, diagonal, row, old_view])
def test_a_change_through_a_view_is_refused_at_its_line(mode, change):
    trainer = make_trainer(mode, batches(4), lambda: Net(change), "plain", rehearse=None)
    with pytest.raises(WrongGradient, match=r"test_gradient_judge.py:\d+ \(`.*changes a tensor"):
        trainer.train(0, 1)


def written(write):
    def change(h, s):
        write(h, s)
        return h + s

    return change


def _square(h, s):
    h *= h


def _set(index):
    def write(h, s):
        h[index] = s[0]

    return write


REPAIRED = {
    "copy_": (written(lambda h, s: h.copy_(s)), lambda h, s: s + s),
    "zero_": (written(lambda h, s: h.zero_()), lambda h, s: h * 0 + s),
    "square": (written(_square), lambda h, s: h * h + s),
    "mul_": (written(lambda h, s: h.mul_(h)), lambda h, s: h * h + s),
    "new axis": (
        written(_set((None, 0))),
        lambda h, s: flow.cat([s[:1], h[1:]]) + s,
    ),
    "items": (
        written(lambda h, s: h.__setitem__((slice(None), slice(2)), h[:, :2] * 2)),
        lambda h, s: flow.cat([h[:, :2] * 2, h[:, 2:]], 1) + s,
    ),
    "metric of a detached tensor": (
        written(lambda h, s: h.mul_(2).detach().view(-1).argmax(0)),
        lambda h, s: h * 2 + s,
    ),
    "addition": (
        written(lambda h, s: h[:, :2].add_(1)),
        lambda h, s: flow.cat([h[:, :2] + 1, h[:, 2:]], 1) + s,
    ),
}


def _weights(mode, change):
    trainer = make_trainer(mode, batches(4), lambda: Net(change), "plain", rehearse=None)
    trainer.train(0, 1)
    return flat_weights(trainer.model)


@BOTH
@pytest.mark.parametrize("name", REPAIRED)
def test_a_change_in_place_trains_like_a_new_tensor(mode, name):
    if name == "addition" and mode == "graph":
        return  # a graph loses it, and the rehearsal refuses it
    in_place, new = REPAIRED[name]
    assert np.abs(_weights(mode, in_place) - _weights("eager", new)).max() < 1e-6


def test_a_sum_through_a_view_is_refused_in_graph_mode_with_its_line():
    """Its gradient is right in eager mode, and a graph loses it."""

    def add(h, s):
        h.transpose(0, 1).add_(1.0)
        return h * s

    with pytest.raises(UserError, match=r"It changes tensors in place at .*\.transpose\(0, 1\)"):
        make_trainer("graph", batches(4), lambda: Net(add), "plain", rehearse=None).train(0, 1)


def test_lgamma_has_its_gradient():
    x = flow.tensor([0.5, 1.0, 3.5, -0.5], requires_grad=True)
    flow.lgamma(x).sum().backward()
    digamma = [-1.9635100, -0.5772157, 1.1031566, 0.0364900]
    assert np.abs(x.grad.numpy() - digamma).max() < 1e-5


def test_a_product_by_scatter_is_refused():
    h = flow.ones(2, 3, requires_grad=True)
    index = flow.zeros(1, 3, dtype=flow.int64)
    with pytest.raises(UserError, match="flow.gather"):
        flow.scatter(h, 0, index, flow.ones(1, 3), reduce="multiply")


@pytest.mark.parametrize("factor", [1.01, 0.0, 1.0])
def test_a_planted_factor_is_found_and_named(monkeypatch, factor):
    monkeypatch.setattr(Planted, "factor", factor)
    judgement = judged(lambda h, s: Planted.apply(h) + s)
    assert judgement.is_wrong == (factor != 1.0)
    assert judgement.is_clear == (factor == 0.0)
    if judgement.is_wrong:
        assert judgement.place.startswith("at or after middle")


BATCH_NORM = nn.BatchNorm1d(8)

RIGHT = {
    "relu": lambda h, s: F.relu(h) + s,
    "stop-gradient": lambda h, s: h * s.detach(),
    "straight-through": lambda h, s: h + (flow.round(h * 3) - h).detach() + s,
    "number": lambda h, s: h / h.max().item() + s,
    "batch norm of two": lambda h, s: BATCH_NORM(h[:2]).sum() + s,
    "ties": lambda h, s: flow.maximum(h, h) + s,
    "dropout": lambda h, s: F.dropout(h, 0.5) + s,
    "in place": lambda h, s: F.relu(h, inplace=True) + s,
    "float": lambda h, s: h.float() + flow.arange(8).to(flow.float32) + s,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_gradient_is_not_suspected(name):
    judgement = judged(RIGHT[name])
    assert judgement.obstacle is None
    assert not judgement.is_wrong, judgement.describe("Net")
    assert not judgement.unused


def _no_grad(h, s):
    with flow.no_grad():
        target = s * 2
    return h * target


def test_blocks_without_gradients_are_opened():
    assert not judged(_no_grad).is_wrong


def _raise_in_double(h, s):
    if h.dtype == flow.float64:
        raise ValueError("no kernel")
    return h + s


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda h, s: Own.apply(h) + s, "its own autograd function Own"),
        (_raise_in_double, "no kernel"),
        (lambda h, s: h * float(np.random.default_rng().random()) + s, "another loss"),
    ],
)
def test_what_cannot_be_judged_is_said(monkeypatch, change, reason):
    monkeypatch.setattr(Planted, "factor", 2.0)
    Own.__module__ = __name__
    judgement = judged(change)
    assert not judgement.is_wrong
    assert reason in judgement.describe("Net")


@pytest.mark.parametrize("change", [lambda h, s: h + s, view, _raise_in_double])
def test_the_judge_leaves_no_trace(change):
    before = [flow.tanh, flow.Tensor.detach, flow.Tensor.to, flow.tensor, flow._C.matmul]
    model = Net(change)
    for parameter in model.parameters():
        parameter.grad = flow.ones_like(parameter)
    kept = [parameter.numpy().copy() for parameter in model.parameters()]
    batch = {key: flow.tensor(value) for key, value in batches(1)[0].items()}
    judge(model, lambda: {key: value.clone() for key, value in batch.items()}, nullcontext)
    after = [flow.tanh, flow.Tensor.detach, flow.Tensor.to, flow.tensor, flow._C.matmul]
    assert all(one is other for one, other in zip(before, after))
    assert flow.get_default_dtype() == flow.float32
    for parameter, values in zip(model.parameters(), kept):
        assert parameter.dtype == flow.float32 and parameter.grad.numpy().min() == 1
        assert np.array_equal(parameter.numpy(), values)


@BOTH
def test_a_weight_that_no_loss_reaches_is_named(mode, caplog):
    caplog.set_level(logging.INFO, "libai.engine")
    change = lambda h, s: h  # noqa: E731
    make_trainer(mode, batches(4), lambda: Net(change), "plain", rehearse=None).train(0, 1)
    assert "reads the trained parameters side.weight, side.bias" in caplog.text
    assert "gradient judged by central differences: right" in caplog.text
