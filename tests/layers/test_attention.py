"""Attention against NumPy in float64, and its masks."""

import numpy as np
import oneflow as flow
import pytest
from layer_checks import WAYS, Apply, relative_error, run
from oneflow import nn

from libai.layers import attention
from libai.layers.attention import (
    attention_scores,
    causal_mask,
    scaled_dot_product_attention,
    self_attention,
)


def attention_float64(q, k, v, mask=0.0):
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def make_qkv(t=5, s=7, width=3, out=4):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 3, n, d)).astype(np.float32) for n, d in ((t, width), (s, width), (s, out))]


def test_equals_float64():
    q, k, v = make_qkv()
    found = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)))
    assert relative_error(found.numpy(), attention_float64(q, k, v)) < 1e-6


def test_mask_is_added():
    q, k, v = make_qkv()
    mask = np.where(np.arange(7) < 4, 0.0, -1e9).astype(np.float32)
    found = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)), mask=flow.tensor(mask))
    assert relative_error(found.numpy(), attention_float64(q, k, v, mask)) < 1e-6
    only_four = attention_float64(q, k[:, :, :4], v[:, :, :4])
    assert relative_error(found.numpy(), only_four) < 1e-6


def test_causal_attention_does_not_see_the_future():
    q, k, v = make_qkv(t=6, s=6)
    before = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)), causal=True).numpy()
    k[:, :, 4:], v[:, :, 4:] = 9.0, -9.0
    after = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)), causal=True).numpy()
    assert (after[:, :, :4] == before[:, :, :4]).all()
    assert (after[:, :, 4:] != before[:, :, 4:]).any()


def test_causal_and_mask_together():
    q, k, v = make_qkv(t=7, s=7)
    padding = np.where(np.arange(7) < 5, 0.0, -1e9).astype(np.float32)
    found = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)), mask=flow.tensor(padding), causal=True)
    both = np.triu(np.full((7, 7), -1e9), 1) + padding
    assert relative_error(found.numpy(), attention_float64(q, k, v, both)) < 1e-6


def test_scores_need_no_transposed_copy():
    q, k, _ = make_qkv()
    assert relative_error(attention_scores(flow.tensor(q), flow.tensor(k)).numpy(), q @ k.swapaxes(-1, -2)) < 1e-6


@pytest.mark.parametrize("way", WAYS[1:])
def test_every_way_equals_eager(way):
    x = make_qkv(t=6, s=6)[0]
    layer = Apply(lambda x: scaled_dot_product_attention(x, x, x, causal=True))
    grad = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    expected, found = run(layer, x, grad, "eager"), run(layer, x, grad, way)
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-6, name


def test_causal_mask_is_zero_on_and_below_the_diagonal():
    mask = causal_mask(flow.zeros(1), 4).numpy()
    assert (mask == np.triu(np.full((4, 4), np.float32(-1e9)), 1)).all()


class SelfAttention(nn.Module):
    """`self_attention` with its three layers, and a causal mask as a model has one."""

    def __init__(self, width, num_heads, mask=None, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.register_buffer("mask", None if mask is None else flow.tensor(mask))

    def forward(self, x):
        return self_attention(x, self.q, self.k, self.v, self.num_heads, self.mask)


def self_attention_float64(x, parameters, grad, num_heads, mask):
    """Output and gradients, from the formulas."""
    x, grad = x.astype(np.float64), grad.astype(np.float64)
    parameters = {name: value.astype(np.float64) for name, value in parameters.items()}
    batch, length, width = x.shape

    def split(y):
        return y.reshape(batch, length, num_heads, -1).swapaxes(1, 2)

    def merge(y):
        return y.swapaxes(1, 2).reshape(batch, length, width)

    q, k, v = (split(x @ parameters[f"{n}.weight"].T + parameters.get(f"{n}.bias", 0.0)) for n in "qkv")
    scale = 1.0 / np.sqrt(width // num_heads)
    scores = scale * q @ k.swapaxes(-1, -2) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_mixed = split(grad)
    d_weights = d_mixed @ v.swapaxes(-1, -2)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    slopes = {"q": scale * d_scores @ k, "k": scale * d_scores.swapaxes(-1, -2) @ q}
    slopes["v"] = weights.swapaxes(-1, -2) @ d_mixed
    found = {"y": merge(weights @ v), "x": np.zeros_like(x)}
    for name, slope in slopes.items():
        rows = merge(slope)
        found["x"] = found["x"] + rows @ parameters[f"{name}.weight"]
        found[f"{name}.weight"] = np.einsum("bti,btj->ij", rows, x)
        found[f"{name}.bias"] = rows.sum((0, 1))
    return found


@pytest.fixture
def self_attention_case():
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal((3, 5, 12)).astype(np.float32) for _ in range(2))
    return x, grad, np.triu(np.full((5, 5), -1e9, np.float32), 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention_equals_float64(way, is_causal, self_attention_case):
    x, grad, mask = self_attention_case
    flow.manual_seed(1)
    layer = SelfAttention(12, 3, mask if is_causal else None)
    parameters = {name: p.numpy().copy() for name, p in layer.named_parameters()}
    expected = self_attention_float64(x, parameters, grad, 3, mask if is_causal else 0.0)
    found = run(layer, x, grad, way)
    # the gradient of the keys' bias is zero, a sum that cancels: compared with the size of the others
    size = np.abs(expected["v.bias"]).max()
    assert np.abs(found.pop("k.bias") - expected.pop("k.bias")).max() < 1e-6 * size
    for name, value in expected.items():
        assert relative_error(found[name], value) < 2e-6, name


def test_self_attention_adds_up_gradients(self_attention_case):
    x, grad, _ = (flow.tensor(a) for a in self_attention_case)
    layer = SelfAttention(12, 3)
    layer(x).backward(grad)
    once = {name: p.grad.numpy().copy() for name, p in layer.named_parameters()}
    layer(x).backward(grad)
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad.numpy(), 2.0 * once[name]) < 1e-6, name


@pytest.mark.parametrize("why", ["frozen", "hooked", "replaced", "without bias", "evaluation"])
def test_self_attention_calls_layers_that_are_not_plain(why, self_attention_case):
    x, _, _ = (flow.tensor(a) for a in self_attention_case)
    layer, calls = SelfAttention(12, 3, bias=why != "without bias"), []
    joined = layer(x).detach().numpy()
    if why == "frozen":
        layer.k.weight.requires_grad = False
    elif why == "hooked":
        layer.q.register_forward_hook(lambda module, inputs, output: calls.append(1))
    elif why == "replaced":

        class Doubled(nn.Linear):
            def forward(self, x):
                return 2.0 * nn.Linear.forward(self, x)

        doubled = Doubled(12, 12)
        doubled.load_state_dict(layer.v.state_dict())
        layer.v = doubled
    with flow.set_grad_enabled(why != "evaluation"):
        y = layer(x)
    assert relative_error(y.detach().numpy(), joined * (2.0 if why == "replaced" else 1.0)) < 1e-6
    assert len(calls) == (why == "hooked")
    if why == "frozen":
        y.sum().backward()
        assert layer.k.weight.grad is None and layer.q.weight.grad is not None


def test_only_plain_training_joins_the_layers(self_attention_case, monkeypatch):
    # the control of the tests above: without it they would pass if nothing were ever joined
    joins = []
    real = attention._joint_projection
    monkeypatch.setattr(attention, "_joint_projection", lambda *args: joins.append(args) or real(*args))
    layer, x = SelfAttention(12, 3), flow.tensor(self_attention_case[0])
    layer(x)
    assert joins == [(3, False)]
    with flow.no_grad():
        layer(x)
    assert len(joins) == 1
