"""Attention against NumPy in float64, and its masks."""

import numpy as np
import oneflow as flow
import pytest
from layer_checks import WAYS, relative_error, run
from oneflow import nn

from libai.layers import causal_mask, scaled_dot_product_attention


def attention_float64(q, k, v, mask=0.0):
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def make_qkv(t=5, s=7, width=3, out=4):
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((2, 3, n, d)).astype(np.float32)
        for n, d in ((t, width), (s, width), (s, out))
    ]


def test_equals_float64():
    q, k, v = make_qkv()
    found = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)))
    assert relative_error(found.numpy(), attention_float64(q, k, v)) < 1e-6


def test_heads_of_keys_serve_groups_of_queries():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 5, 4)).astype(np.float32) for heads in (6, 2, 2))
    mask = np.triu(np.full((5, 5), -1e9, np.float32), 1)
    found = scaled_dot_product_attention(*map(flow.tensor, (q, k, v)), flow.tensor(mask)).numpy()
    repeated = attention_float64(q, k.repeat(3, axis=1), v.repeat(3, axis=1), mask)
    assert relative_error(found, repeated) < 1e-6
    assert (
        relative_error(
            found, attention_float64(q, np.tile(k, (1, 3, 1, 1)), v.repeat(3, axis=1), mask)
        )
        > 0.01
    )


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", causal_mask(6))

    def forward(self, x):
        return scaled_dot_product_attention(x, x, x, self.mask)


@pytest.mark.parametrize("way", WAYS[1:])
def test_every_way_equals_eager(way):
    x = make_qkv(t=6, s=6)[0]
    layer = SelfAttention()
    grad = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    expected, found = run(layer, x, grad, "eager"), run(layer, x, grad, way)
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-6, name
