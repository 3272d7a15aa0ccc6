"""A detached view loses its storage offset in OneFlow 0.9.0, but not with `detached`."""

import gc
import weakref

import numpy as np
import oneflow as flow
import pytest
from toy import Classifier, Tagger, make_trainer

from libai.utils.tensors import detached, fetch_scalars, saved_tensor_hooks, saved_values

VIEWS = {
    "slice": lambda x: x[2:5],
    "row": lambda x: x.reshape(2, 3)[1],
    "unbind": lambda x: x.reshape(2, 3).unbind(0)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "whole": lambda x: x,
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_detached_view_have_its_values(view, requires_grad):
    x = flow.arange(6).to(flow.float32).requires_grad_(requires_grad) * 1.0
    source = VIEWS[view](x)
    expected = source.numpy().copy()
    found = detached(source)
    assert not found.requires_grad
    assert np.array_equal(found.numpy(), expected)
    assert np.array_equal(found.reshape(-1, 1).numpy().ravel(), expected)
    assert np.array_equal(flow.stack([found]).numpy()[0], expected)


def test_scalars_come_as_float64_whatever_their_types():
    values = fetch_scalars(
        [flow.tensor(1.5), flow.tensor([2, 3]), flow.tensor(4.0, requires_grad=True)]
    )
    assert [list(value) for value in values] == [[1.5], [2.0, 3.0], [4.0]]
    assert all(value.dtype == np.float64 for value in values)
    assert fetch_scalars([]) == []


class Parts(Classifier):
    """Its loss and metrics are views of one tensor, as of a head that computes them together."""

    def forward(self, x, y):
        loss = Classifier.forward(self, x, y)["losses"]["cls"]
        parts = flow.stack([loss * 100.0, loss, loss * 0.0 + 7.0]).unbind(0)
        return {"losses": {"cls": parts[1]}, "metrics": {"seven": parts[2]}}


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_losses_and_metrics_that_are_views_are_logged_as_they_are(mode):
    logged = []
    for model in (Classifier, Parts):
        trainer = make_trainer(mode, model=model)
        trainer.train(0, 1)
        logged.append(trainer.fetch_metrics())
    assert logged[1]["train/cls"] == pytest.approx(logged[0]["train/cls"], rel=1e-6)
    assert logged[1]["train/seven"] == 7.0


class Packed:
    """A value saved by a hook. A weak reference shows whether it is freed."""

    def __init__(self, tensor):
        self.tensor = tensor


def packing(packed):
    def pack(tensor):
        value = Packed(tensor)
        packed.add(value)
        return value

    return pack


@pytest.mark.parametrize(
    "hooks, frees",
    [(saved_tensor_hooks, True), (flow.autograd.graph.saved_tensors_hooks, False)],
)
def test_values_saved_by_hooks_are_freed_after_the_backward_pass(hooks, frees):
    """OneFlow's own hooks never free what they save."""
    weight = flow.ones(3, requires_grad=True)
    packed = weakref.WeakSet()
    with hooks(packing(packed), lambda value: value.tensor):
        loss = (weight * weight).sum()
    assert len(packed) > 0
    loss.backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    saved_values.clear()
    if not frees:
        del loss
        gc.collect()
    assert (len(packed) == 0) == frees


def test_an_eager_rehearsal_frees_the_values_that_it_saves():
    make_trainer("eager", model=Tagger).prepare()
    assert saved_values == {}
