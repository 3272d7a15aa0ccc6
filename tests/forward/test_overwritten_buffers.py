"""Buffers that forward changes behind what the backward pass reads: right in both modes, or refused by name."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from test_forward_state import assert_same_buffers, built, data, plain_loop, trained

from libai.utils.errors import UserError


class Overwrites(nn.Module):
    """Reads a buffer, or with `copies` a copy of it, and changes it in the same forward."""

    def __init__(self, way: str, copies: bool = False):
        super().__init__()
        self.way, self.copies = way, copies
        self.body, self.head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 1)
        self.register_buffer("scale", flow.tensor([1.0, 2.0, 3.0]))
        self.factor = flow.tensor([0.9, 0.5, 1.5])
        self.teacher = nn.Parameter(flow.tensor([1.0, 2.0, 3.0]), requires_grad=False)

    def read(self):
        value = self.teacher if self.way == "frozen parameter" else self.scale
        return value.clone() if self.copies else value

    def forward(self, x):
        h = self.body(x)
        m = h.abs().mean(0).detach()
        if self.way == "old view":
            view = self.read().view(1, 3)
            self.scale.mul_(self.factor)
            h = h + view.sum()
        elif self.way == "several":
            h = h / self.read()
            self.scale.mul_(self.factor)
            h = h * self.read()
            self.scale = self.scale + m
            h = h / self.read()
            self.scale += 1.0
        elif self.way == "frozen parameter":
            h = h / self.read()
            self.teacher.data.mul_(self.factor)
        else:
            h = h / self.read()
            OVERWRITES[self.way](self, m)
        return {"losses": {"mse": (self.head(h) ** 2).mean()}}


OVERWRITES = {
    "mul_": lambda model, m: model.scale.mul_(model.factor),
    "copy_": lambda model, m: model.scale.copy_(model.scale * 0.9 + m),
    "through detach": lambda model, m: model.scale.detach().add_(m),
    "data": lambda model, m: setattr(model.scale, "data", model.scale * 0.9 + m),
    "view": lambda model, m: model.scale.view(3, 1).mul_(0.9),
    "function": lambda model, m: nn.functional.relu(model.scale.sub_(1.5), inplace=True),
}
#: what no stand-in can follow; the gradient depends on it
REFUSED = ("view", "function")


RIGHT = [way for way in OVERWRITES if way not in REFUSED] + ["several", "frozen parameter"]


@pytest.mark.parametrize(
    ("mode", "way"),
    [("graph", "several"), *(pytest.param("eager", way, marks=pytest.mark.e2e) for way in RIGHT)],
)
def test_backward_reads_what_forward_has_read(mode, way):
    reference, model = built(lambda: Overwrites(way, copies=True)), built(lambda: Overwrites(way))
    expected = plain_loop(reference, data(8), 2)
    losses, _ = trained(mode, model, data(8), 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_buffers(model, reference)


def test_a_graph_refuses_to_change_a_frozen_parameter():
    with pytest.raises(UserError, match="changes the parameter teacher"):
        trained("graph", Overwrites("frozen parameter"), data(2))


@pytest.mark.parametrize("way", REFUSED)
def test_what_shares_the_memory_of_a_buffer_is_refused_where_backward_reads_it(mode, way):
    with pytest.raises(UserError) as raised:
        trained(mode, Overwrites(way), data(2))
    assert "buffer scale (Overwrites, " in str(raised.value)
    assert "through a view" in str(raised.value)


class Blocks(nn.Module):
    """Two blocks that normalize by an average of their own and count."""

    plan = {"blocks": "layers"}

    def __init__(self, way: str, copies: bool = False):
        super().__init__()
        self.layers = nn.Sequential(*[Overwriting(way, copies) for _ in range(2)])

    def forward(self, x):
        return {"losses": {"mse": (self.layers(x) ** 2).mean()}}


class Overwriting(Overwrites):
    def forward(self, x):
        h = flow.tanh(self.body(x)) / self.read()
        if self.way == "assign":
            self.scale = self.scale * 0.9 + h.abs().mean(0).detach()
        else:
            self.scale.mul_(self.factor).add_(h.abs().mean(0).detach())
        return h * self.read()


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["assign", "in place"])
def test_blocks_whose_activations_are_computed_again_change_buffers_once(mode, way):
    reference, model = built(lambda: Blocks(way, copies=True)), built(lambda: Blocks(way))
    expected = plain_loop(reference, data(6), 2)
    losses, _ = trained(mode, model, data(6), 2, activation_checkpoint=True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_buffers(model, reference)


def test_a_view_from_before_a_change(mode):
    """Eagerly it sees the change, and in a graph it would not."""
    if mode == "graph":
        with pytest.raises(UserError, match="reads a view of it"):
            trained(mode, Overwrites("old view"), data(2))
        return
    expected = plain_loop(built(lambda: Overwrites("old view")), data(4))
    losses, _ = trained(mode, built(lambda: Overwrites("old view")), data(4))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
