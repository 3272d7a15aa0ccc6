"""Initial weights: one stream per parameter name."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from libai.models.blocks.init import he_std, init_weights, transformer_std


class Net(nn.Module):
    def __init__(self, extra=False):
        super().__init__()
        if extra:
            self.early = nn.Linear(8, 8)
        self.a = nn.Linear(40, 50)
        self.b = nn.Linear(40, 50)
        self.norm = nn.LayerNorm(50)
        self.head = nn.Linear(50, 40)
        self.twin = nn.Linear(40, 50)
        self.twin.weight = self.a.weight


def build(seed, **options):
    flow.manual_seed(seed)
    net = Net(**options)
    init_weights(net, lambda name, parameter: 0.5)
    return net


def test_a_new_layer_leaves_the_others_as_they_are():
    plain, extended = build(1), build(1, extra=True)
    np.testing.assert_array_equal(plain.b.weight.numpy(), extended.b.weight.numpy())


def test_stock_initialisation_is_shifted_by_a_new_layer():
    """The negative control: what `init_weights` is for."""
    weights = []
    for extra in (False, True):
        flow.manual_seed(1)
        weights.append(Net(extra).b.weight.numpy())
    assert np.any(weights[0] != weights[1])


def test_layers_of_one_shape_differ_and_are_normal():
    net = build(2)
    a, b = net.a.weight.numpy(), net.b.weight.numpy()
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1  # 2000 values: 4.5 standard errors
    assert a.std() == pytest.approx(0.5, rel=0.1) and abs(a.mean()) < 0.05


def test_shared_parameter_is_filled_once_and_stays_shared():
    net = build(4)
    assert net.twin.weight is net.a.weight


def test_rules():
    net = Net()
    assert he_std("a.weight", net.a.weight) == pytest.approx((2 / 40) ** 0.5)
    assert he_std("head.weight", net.head.weight) == 0.01
    rule = transformer_std(1000, 8, projections=("b.weight",))
    assert rule("a.weight", net.a.weight) == pytest.approx(0.02)
    assert rule("b.weight", net.b.weight) == pytest.approx(0.005)  # sqrt(2 * 8 layers) = 4
    narrow = transformer_std(10, 8, projections=("b.weight",))
    assert narrow("a.weight", net.a.weight) == pytest.approx(0.2)
    assert narrow("head.weight", net.head.weight) == 0.02
