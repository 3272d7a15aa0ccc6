"""State that Python keeps out of sight: in hooks of gradients, beside what cannot be copied, in plain tensors."""

from __future__ import annotations

import threading

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from test_forward_state import STEPS, Averaging, Remembers, built, data, plain_loop, trained

from libai.utils.errors import UserError


class GradientHooks(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)
        counts = [0]
        if kind == "of a parameter":
            self.a.weight.register_hook(lambda grad: grad * 2.0)
        elif kind == "counts":
            self.a.weight.register_hook(lambda grad: counts.__setitem__(0, counts[0] + 1))

    def forward(self, x):
        h = self.a(x)
        if self.kind == "of an activation":
            h.register_hook(lambda grad: grad * 2.0)
        elif self.kind == "global":
            h.register_hook(_count_step)
        return {"losses": {"mse": (self.b(flow.tanh(h)) ** 2).mean()}}


def _count_step(grad):
    STEPS[0] += 1


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["of a parameter", "of an activation"])
def test_pure_gradient_hooks_run_in_both_modes(mode, kind):
    expected = plain_loop(built(lambda: GradientHooks(kind)), data(6), 2)
    losses, _ = trained(mode, built(lambda: GradientHooks(kind)), data(6), 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(("kind", "named"), [("counts", "counts"), ("global", "STEPS")])
def test_gradient_hooks_that_remember_are_refused_in_a_graph(kind, named):
    model = GradientHooks(kind)
    before = model.a.weight.numpy().copy()
    with pytest.raises(UserError, match=rf"a gradient hook .* changes {named} \(.*test_hidden_state.py:"):
        trained("graph", model, data(2))
    assert (model.a.weight.numpy() == before).all()
    assert len(trained("eager", GradientHooks(kind), data(2))[0]) == 2


class Untried(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.kind, self.calls = kind, 0
        self.odd = {"lock": threading.Lock(), "generator": iter_forever(), "counts": threading.Lock()}[kind]

    def forward(self, x):
        if self.kind == "counts":
            self.calls += 1
        factor = float(next(self.odd)) if self.kind == "generator" else 1.0
        return {"losses": {"mse": (self.layer(x) ** 2).mean() * factor}}


def iter_forever():
    number = 0
    while True:
        yield 1.0 + number
        number += 1


def test_what_cannot_be_copied_does_not_hide_state():
    expected = plain_loop(built(lambda: Untried("lock")), data(4))
    np.testing.assert_allclose(trained("graph", built(lambda: Untried("lock")), data(4))[0], expected, rtol=1e-5)
    with pytest.raises(UserError, match="self.calls"):
        trained("graph", Untried("counts"), data(2))
    with pytest.raises(UserError, match="could not be found out by a trial.*generator"):
        trained("graph", Untried("generator"), data(2))
    expected = plain_loop(built(lambda: Untried("generator")), data(4))
    np.testing.assert_allclose(trained("eager", built(lambda: Untried("generator")), data(4))[0], expected, rtol=1e-5)


def test_a_changing_buffer_that_is_not_saved_is_named(mode, caplog):
    trained(mode, Averaging("assign"), data(1))
    assert "changes the buffer count (Averaging, " in caplog.text
    assert "persistent=False" in caplog.text and "buffer average" not in caplog.text


@pytest.mark.parametrize(("kind", "named"), [("tensor", True), ("cache", False)])
def test_an_eager_run_names_tensors_that_no_checkpoint_holds(caplog, kind, named):
    trained("eager", Remembers(kind), data(2))
    assert ("which no checkpoint holds" in caplog.text) == named
