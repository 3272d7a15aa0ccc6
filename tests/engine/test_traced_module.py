"""A module can be used in a traced forward as outside: special methods and dicts of tensors."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from libai.engine import EagerTrainer, GraphTrainer, hooks

UPDATES = 5


class Bank(nn.Module):
    """Has special methods of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("0", flow.full((4,), 2.0))
        self.register_buffer("1", flow.full((4,), 3.0))
        self.register_buffer("none", None)

    def __getitem__(self, k):
        if k > 1:
            raise IndexError(k)
        return getattr(self, str(k))

    def __len__(self):
        return 2


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = {"a": 2.0, "b": 3.0}

    def __iter__(self):
        return iter(self.table)

    def __contains__(self, name):
        return name in self.table


class Empty(nn.Module):
    def __len__(self):
        return 0


def write_buffer(net, h):
    net._buffers["count"] = net._buffers["count"] + 1
    return h * net.count


def write_in_place(net, h):
    net._buffers["count"].add_(1)
    return h * net.count


USES = {
    "item": lambda net, h: h * net.bank[0] + net.bank[1],
    "length": lambda net, h: h * len(net.bank),
    "loop": lambda net, h: sum((h * one for one in net.bank), h),
    "names": lambda net, h: h * len([*net.named]),
    "contained": lambda net, h: h * (2.0 if "a" in net.named and "c" not in net.named else 0.5),
    "truth": lambda net, h: h * (2.0 if net.fc and net.bank and not net.empty else 0.5),
    "buffer": lambda net, h: h * net.bank._buffers["0"],
    "buffers": lambda net, h: sum(
        (h * one for one in net.bank._buffers.values() if one is not None), h
    ),
    "buffer names": lambda net, h: h * len(net.bank._buffers) if "none" in net.bank._buffers else h,
    "missing": lambda net, h: h * (2.0 if net._buffers.get("other") is None else 0.5),
    "parameter": lambda net, h: h * net.fc._parameters["bias"].sum() + h,
    "parameters": lambda net, h: sum((p.sum() for p in net.fc._parameters.values()), h),
    "written": write_buffer,
    "written in place": write_in_place,
}


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.fc, self.bank, self.named, self.empty = nn.Linear(4, 4), Bank(), Named(), Empty()
        self.register_buffer("count", flow.zeros(4))
        self.use = use

    def forward(self, x, y):
        return ((self.use(self, self.fc(x)) * 0.3 - y) ** 2).mean()


def batch(i):
    random = np.random.default_rng(i)
    return {name: random.normal(size=(8, 4)).astype("float32") for name in "xy"}


def build(use):
    net = Net(use)
    for seed, parameter in enumerate(net.parameters()):
        values = np.random.default_rng(seed).normal(0, 0.3, tuple(parameter.shape))
        parameter.data.copy_(flow.tensor(values.astype("float32")))
    return net, flow.optim.SGD(net.parameters(), lr=0.02)


def plain(use):
    net, optimizer = build(use)
    losses = []
    for i in range(UPDATES):
        loss = net(**{key: flow.tensor(value) for key, value in batch(i).items()})
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", [EagerTrainer, GraphTrainer])
@pytest.mark.parametrize("name", USES)
def test_a_module_can_be_used_in_forward_as_outside(kind, name):
    net, optimizer = build(USES[name])
    trainer = kind(net, map(batch, range(UPDATES + 4)), optimizer)
    losses = []
    record = hooks.CallbackHook(
        after_step=lambda trainer: losses.append(trainer.fetch_metrics()["train/loss"])
    )
    trainer.register_hooks([record])
    trainer.train(0, UPDATES)
    np.testing.assert_allclose(losses, plain(USES[name]), rtol=1e-5)
    if kind is GraphTrainer:
        assert trainer.graph is not None
