"""The joined two-layer network against NumPy in float64, and when the layers are called one by one."""

import math

import numpy as np
import oneflow as flow
import pytest
from layer_checks import WAYS, relative_error, run
from oneflow import nn

from libai.layers import GELU, Linear, ffn
from libai.models.transformer import MLPBlock


def network_float64(x, parameters, grad, approximate="none"):
    """Output and gradients of down(gelu(up(x)))."""
    x, grad = x.astype(np.float64), grad.astype(np.float64)
    p = {name: value.astype(np.float64) for name, value in parameters.items()}
    inner = x @ p["up.weight"].T + p["up.bias"]
    if approximate == "tanh":
        c = math.sqrt(2.0 / math.pi)
        t = np.tanh(c * (inner + 0.044715 * inner**3))
        value = 0.5 * inner * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * inner * (1.0 - t**2) * c * (1.0 + 3.0 * 0.044715 * inner**2)
    else:
        phi = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2.0)))(inner)
        value, slope = inner * phi, phi + inner * np.exp(-(inner**2) / 2.0) / math.sqrt(2.0 * math.pi)
    d_inner = (grad @ p["down.weight"]) * slope

    def rows(a):
        return a.reshape(-1, a.shape[-1])

    return {
        "y": value @ p["down.weight"].T + p["down.bias"],
        "x": d_inner @ p["up.weight"],
        "up.weight": rows(d_inner).T @ rows(x),
        "up.bias": rows(d_inner).sum(0),
        "down.weight": rows(grad).T @ rows(value),
        "down.bias": rows(grad).sum(0),
    }


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((4, 5, 12)).astype(np.float32) for _ in range(2)]


@pytest.fixture
def joins(monkeypatch):
    found, real = [], ffn._joint_layers
    monkeypatch.setattr(ffn, "_joint_layers", lambda *args: found.append(args) or real(*args))
    return found


def make_block(approximate="none"):
    flow.manual_seed(1)
    block = MLPBlock(12, 3.0)
    block.activation = GELU(approximate)
    return block


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_network_equals_float64(way, approximate, case, joins):
    x, grad = case
    block = make_block(approximate)
    parameters = {name: p.numpy().copy() for name, p in block.named_parameters()}
    found = run(block, x, grad, way)
    for name, expected in network_float64(x, parameters, grad, approximate).items():
        # GELU and its slope are right to 1e-6
        assert relative_error(found[name], expected) < 3e-6, name
    assert joins == ([(approximate, True)] if way == "eager" else [])


def test_gradients_of_two_passes_add_up(case):
    x, grad = (flow.tensor(a) for a in case)
    block = make_block()
    block(x).backward(grad)
    once = {name: p.grad.numpy().copy() for name, p in block.named_parameters()}
    block(x).backward(grad)
    for name, parameter in block.named_parameters():
        assert relative_error(parameter.grad.numpy(), 2.0 * once[name]) < 1e-6, name


class Doubled(Linear):
    """A layer of the user's own."""

    def forward(self, x):
        return 2.0 * Linear.forward(self, x)


@pytest.mark.parametrize("why", ["frozen", "hooked", "hooked activation", "replaced", "relu", "evaluation"])
def test_layers_that_are_not_plain_are_called(why, case, joins):
    x = flow.tensor(case[0])
    block, calls = make_block(), []
    joined = block(x).detach().numpy()
    assert joins == [("none", False)]
    factor = 1.0
    if why == "frozen":
        block.up.weight.requires_grad = False
    elif why.startswith("hooked"):
        layer = block.activation if why.endswith("activation") else block.up
        layer.register_forward_hook(lambda module, inputs, output: calls.append(1))
    elif why == "replaced":
        own, factor = Doubled(36, 12), 2.0
        own.load_state_dict(block.down.state_dict())
        block.down = own
    elif why == "relu":
        block.activation = nn.ReLU()
        inner = np.maximum(block.up(x).detach().numpy(), 0.0)
        joined = inner @ block.down.weight.numpy().T + block.down.bias.numpy()
    with flow.set_grad_enabled(why != "evaluation"):
        y = block(x)
    assert relative_error(y.detach().numpy(), factor * joined) < 1e-6
    assert len(joins) == 1
    assert len(calls) == why.startswith("hooked")
    if why == "frozen":
        y.sum().backward()
        assert block.up.weight.grad is None and block.down.weight.grad is not None
