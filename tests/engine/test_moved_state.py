"""State belongs to the object that a hook moves, not to its name: momentum of parameters and values
of buffers, in both modes, as in a plain loop.
"""

from types import SimpleNamespace

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

# trainings with several compilations
pytestmark = pytest.mark.e2e

UPDATES = 12
#: the update after which the hook acts
MOVED = 4


def momentum(net):
    return flow.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def adam(net):
    return flow.optim.AdamW(net.parameters(), lr=0.05)


def head_only(net):
    return flow.optim.SGD([*net.a.parameters(), *net.items.parameters()], lr=0.05, momentum=0.9)


class Scale(nn.Module):
    """Multiplies by a buffer that its forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("value", flow.ones(4))

    def forward(self, h):
        if self.training:
            self.value.copy_(self.value * 0.9 + h.detach().mean(0) * 0.1)
        return h * self.value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.items = nn.Linear(4, 4), nn.Linear(4, 4), nn.ModuleList()
        self.items.extend([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.first, self.second = Scale(), nn.Identity()
        for seed, name in enumerate("uvw"):
            self.register_buffer(name, flow.tensor(toy.numbers(seed)[0]))
        self.register_buffer("alias", self.w)

    def forward(self, x, y):
        h = flow.tanh(self.first(self.a(x)))
        h = self.items[1](flow.tanh(self.items[0](h)))
        h = self.second(getattr(self, "renamed", self.b)(h)) * self.u
        return ((h + self.v * self.w + self.alias - y) ** 2).mean()


def exchange_layers(net):
    net.a, net.b = net.b, net.a


def exchange_items(net):
    net.items[0], net.items[1] = net.items[1], net.items[0]


def rename(net):
    net.renamed = net.b
    del net.b
    net.b = None


def exchange_buffers(net):
    net.u, net.v = net.v + 0.5, net.u


def rotate_buffers(net):
    net._buffers["u"], net._buffers["v"], net.w = net.v, net.w, net.u


def share(net):
    net.u = net.v


def part(net):
    net.alias = net.w + 1


def move_changing(net):
    net.first, net.second = net.second, net.first


MOVES = {
    "layers": exchange_layers,
    "items": exchange_items,
    "renamed": rename,
    "buffers": exchange_buffers,
    "rotated": rotate_buffers,
    "shared": share,
    "parted": part,
    "changing": move_changing,
    "none": lambda net: None,
}


def build(make_optimizer):
    net = toy.seeded(Net())
    return net, make_optimizer(net)


def act(net, move, i):
    if i == MOVED:
        move(net)
    if i == MOVED + 3:
        net.v.add_(0.25)  # reaches every name of the tensor
        net.w.mul_(0.5)


def plain(make_optimizer, move):
    net, optimizer = build(make_optimizer)
    losses = toy.plain_losses(net, optimizer, toy.pair, UPDATES, lambda i: act(net, move, i))
    return losses, state_of(net)


def state_of(net):
    return {name: value.numpy() for name, value in net.state_dict().items()}


def trained(mode, make_optimizer, move):
    net, optimizer = build(make_optimizer)
    saved = {}

    def after(trainer):
        act(net, move, trainer.iter)
        if trainer.iter == MOVED:
            tensors, _ = trainer.optimizer_state.export()
            saved.update({name: value.numpy().copy() for name, value in tensors.items()})

    losses, _ = toy.trained_losses(mode, net, optimizer, toy.pair, UPDATES, after)
    return SimpleNamespace(losses=losses, state=state_of(net), saved=saved)


@pytest.mark.parametrize(
    "name, make_optimizer", [*((name, momentum) for name in MOVES), ("layers", head_only)]
)
def test_state_follows_the_object_that_a_hook_moves(name, make_optimizer):
    """Also if a layer takes the place of one that has no updates."""
    losses, state = plain(make_optimizer, MOVES[name])
    run = trained("graph", make_optimizer, MOVES[name])
    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)
    assert run.state.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_allclose(run.state[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("move", [exchange_layers, rename])
def test_a_checkpoint_right_after_the_move_has_the_state_under_the_new_names(move):
    saved = {mode: trained(mode, adam, move).saved for mode in ("eager", "graph")}
    assert saved["eager"].keys() == saved["graph"].keys()
    for key, value in saved["eager"].items():
        np.testing.assert_allclose(saved["graph"][key], value, rtol=1e-4, atol=1e-6)


def test_the_moves_matter():
    """Negative control: a run that ignores a move would be seen by the comparison."""
    unmoved, _ = plain(adam, MOVES["none"])
    for name in MOVES.keys() - {"none"}:
        if name not in ("renamed", "shared", "parted"):
            assert max(abs(np.array(plain(adam, MOVES[name])[0]) / unmoved - 1)) > 1e-3, name
