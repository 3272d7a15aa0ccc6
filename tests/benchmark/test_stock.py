"""The stock contender runs OneFlow's own layers, one by one; ours run joined."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
import oneflow as flow
from libai.benchmark.stock import use_stock_layers
from libai.layers import GELU, LayerNorm, Linear, add_to_each, apply_linear, repeat_for_each
from libai.models.transformer import Attention, MLPBlock

if sys.argv[1] == "stock":
    use_stock_layers()
x = flow.randn(2, 3, 8, requires_grad=True)
for layer in (LayerNorm(8), GELU(), Linear(8, 4), MLPBlock(8, 2), Attention(8, 2)):
    print(layer(x).grad_fn.name())
    attended = layer
attended.out = flow.nn.Identity()
print(attended(x).grad_fn.name())
shared = flow.randn(3, 8, requires_grad=True)
print(add_to_each(x, shared).grad_fn.name())
print(repeat_for_each(shared.reshape(1, 3, 8), 2).grad_fn.name())
print(apply_linear(x, shared, flow.randn(3, requires_grad=True)).grad_fn.name())
"""


def last_operations(layers):
    """What LayerNorm, GELU, Linear, a feed-forward block, attention, attention without its last layer, positions, a
    class token and a tied layer end in."""
    command = [sys.executable, "-c", PROGRAM, layers]
    environment = {**os.environ, "LIBAI_NATIVE": "0"} if layers == "stock" else None
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


def test_the_stock_contender_runs_what_oneflow_ships():
    ours, stock = last_operations("ours"), last_operations("stock")
    assert all(a != b for a, b in zip(ours, stock)), (ours, stock)
    added = "broadcast_add_backward"  # on CPU OneFlow composes its LayerNorm, too
    expected = [added, "gelu_backward", added, added, added, "reshape_backward", added, "view::expand_backward", added]
    assert stock == expected
    names = ["Rows", "JointLayers", "Rows", "Merging", "Adding", "view::reshape", "Rows"]
    assert [name.removesuffix("_backward") for name in ours[2:]] == names
