"""A module can be used in a traced forward as outside: special methods and dicts of tensors."""

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.utils.errors import UserError

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


def class_of(net):
    return type(net)


USES = {
    "class": lambda net, h: h * type(net).SCALE * class_of(net).SCALE,
    "class method": lambda net, h: type(net).scaled(h),
    "class name": lambda net, h: h * len(type(net).__name__ + type(net.fc).__name__),
    "same class": lambda net, h: h * (2 if type(net) is Net is net.__class__ else 5),
    "class of a child": lambda net, h: h * (2 if type(net.fc) is nn.Linear else 5),
    "other types": lambda net, h: (
        h * (2 if type(h) is flow.Tensor and type(net.use) is not int else 5)
    ),
    "dict": lambda net, h: h * vars(net)["scale"] * net.__dict__["scale"],
    "is a type": lambda net, h: h * (2 if isinstance(type(net), type) else 5),
    "made class": lambda net, h: h * type("Made", (), {"SCALE": 2}).SCALE,
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
    "slice": lambda net, h: net.layers[:2](h),
    "made in forward": lambda net, h: nn.Sequential(net.fc, nn.Sequential(nn.Tanh()))(h),
    # of a batch norm, after and before the layer runs
    "statistic, mean": lambda net, h: net.norm(h) + net.norm.running_mean,
    "statistic, variance": lambda net, h: net.norm(h) * net.norm.running_var,
    "statistic, dict": lambda net, h: net.norm(h) + net.norm._buffers["running_mean"],
    "statistic, count": lambda net, h: net.norm(h) * net.norm.num_batches_tracked.float(),
    "statistic, all": lambda net, h: sum(
        (one.float().sum() for one in net.norm.buffers()), net.norm(h)
    ),
    "statistic, alias": lambda net, h: (lambda mean: net.norm(h) + mean)(net.norm.running_mean),
    "statistic, before": lambda net, h: net.norm(h + net.norm.running_mean),
    "statistic, apart": lambda net, h: net.norm(h).sum() + net.norm.running_mean.sum(),
}


class Net(nn.Module):
    SCALE = 2.0

    @classmethod
    def scaled(cls, h):
        return h * cls.SCALE

    def __init__(self, use):
        super().__init__()
        self.fc, self.bank, self.named, self.empty = nn.Linear(4, 4), Bank(), Named(), Empty()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.register_buffer("count", flow.zeros(4))
        self.norm = nn.BatchNorm1d(4)
        self.use, self.scale = use, 1.5

    def forward(self, x, y):
        return ((self.use(self, self.fc(x)) * 0.3 - y) ** 2).mean()


def build(use):
    net = toy.seeded(Net(use))
    return net, flow.optim.SGD(net.parameters(), lr=0.02)


@pytest.mark.parametrize("name", USES)
def test_a_module_can_be_used_in_a_traced_forward_as_outside(name):
    expected = toy.plain_losses(*build(USES[name]), toy.pair, UPDATES)
    losses, trainer = toy.trained_losses("graph", *build(USES[name]), toy.pair, UPDATES)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if not name.startswith("statistic"):  # some of which a graph cannot contain
        assert trainer.graph is not None


def test_batches_are_counted_only_while_a_batch_norm_tracks_them(mode):
    net, optimizer = build(lambda net, h: net.norm(h))

    def after(trainer):
        net.norm.track_running_stats = trainer.iter != 1

    toy.trained_losses(mode, net, optimizer, toy.pair, UPDATES, after)
    assert net.norm.num_batches_tracked.item() == UPDATES - 1


#: all operations of OneFlow 0.9 that sample from its generator
SAMPLES = {
    "bernoulli": lambda h: flow.bernoulli(flow.full((8, 4), 0.7)),
    "bernoulli method": lambda h: flow.full((8, 4), 0.7).bernoulli(),
    "bernoulli_": lambda h: flow.ones(8, 4).bernoulli_(0.7),
    "randperm": lambda h: flow.randperm(8).unsqueeze(1),
    "rand": lambda h: flow.rand(8, 4),
    "randn": lambda h: flow.randn(8, 4),
    "randn_like": flow.randn_like,
    "randint": lambda h: flow.randint(0, 9, (8, 4)),
    "randint_like": lambda h: flow.randint_like(h, 0, 9),
    "normal": lambda h: flow.normal(0.0, 1.0, (8, 4)),
    "normal_": lambda h: flow.ones(8, 4).normal_(),
    "uniform_": lambda h: flow.ones(8, 4).uniform_(),
    "exponential_": lambda h: flow.ones(8, 4).exponential_(),
    "multinomial": lambda h: flow.multinomial(flow.ones(8, 4), 1),
    "gumbel_softmax": lambda h: nn.functional.gumbel_softmax(h),
    "xavier_uniform_": lambda h: nn.init.xavier_uniform_(flow.ones(8, 4)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_compiled_step_samples_nothing(name):
    net, optimizer = build(lambda net, h: h * SAMPLES[name](h).float())
    with pytest.raises(UserError, match=r"at .*test_traced_module.py:\d+ samples .* in the batch"):
        toy.trained_losses("graph", net, optimizer, toy.pair, 4)
