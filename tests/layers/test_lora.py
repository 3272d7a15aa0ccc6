"""Adapters of single layers: their outputs, merging, and layers that cannot be adapted."""

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow import nn
from refusals import refused

from libai.layers import add_lora, merge_lora


class Net(nn.Module):
    """Linear layers, and a convolution that has no adapter."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.head(flow.relu(self.mix(flow.relu(self.stem(x)).mean(dim=(2, 3)))))


def adapted(**options):
    """All linear layers adapted, by adapters that count."""
    flow.manual_seed(0)
    net = Net()
    add_lora(net, ["."], **options)
    with flow.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.copy_(flow.randn(*parameter.shape))
    return net


X = np.random.RandomState(0).randn(5, 3, 8, 8).astype(np.float32)


def test_new_adapters_change_nothing_and_names_stay():
    flow.manual_seed(0)
    net = Net()
    before, names = net(flow.tensor(X)).numpy(), list(net.state_dict())
    assert add_lora(net, ["mix", "head"], rank=2) == ["mix", "head"]
    assert np.array_equal(net(flow.tensor(X)).numpy(), before)
    added = {"head.lora_A.weight", "head.lora_B.weight", "mix.lora_A.weight", "mix.lora_B.weight"}
    assert set(net.state_dict()) - set(names) == added
    assert {name for name, parameter in net.named_parameters() if parameter.requires_grad} == added
    assert isinstance(net.mix, nn.Linear) and type(net.mix).__name__ == "Linear"


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_merged_weights_compute_the_same(alpha):
    net = adapted(rank=2, alpha=alpha)
    before, plain = net(flow.tensor(X)).numpy(), Net()
    added = (net.mix.lora_B.weight @ net.mix.lora_A.weight).numpy() * (3.0 if alpha else 1.0)
    expected = net.mix.weight.numpy() + added  # alpha / rank
    merge_lora(net)
    assert_allclose(net.mix.weight.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert_allclose(net(flow.tensor(X)).numpy(), before, rtol=1e-5, atol=1e-5)  # float32 rounding
    assert list(net.state_dict()) == list(plain.state_dict()) and type(net.mix) is nn.Linear
    plain.load_state_dict(net.state_dict())
    assert np.array_equal(plain(flow.tensor(X)).numpy(), net(flow.tensor(X)).numpy())


def test_mistakes_are_named():
    with refused(r"patterns has 'mixx', which matches none of the 2 linear.*Near: mix"):
        add_lora(Net(), ["mix", "mixx"])
    with refused(r"also_train has 'heads'.*Near: head\.weight"):
        add_lora(Net(), ["mix"], also_train=["heads"])
    tied = Net()
    tied.copy = nn.Linear(8, 4, bias=False)
    tied.copy.weight = tied.head.weight
    with refused("matches head, which shares its weight with copy"):
        add_lora(tied, ["head"])
