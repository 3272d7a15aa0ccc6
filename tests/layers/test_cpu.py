"""Where operations run."""

import oneflow as flow
from layer_checks import CPU, SPLIT
from oneflow import nn

from libai.layers import cpu
from libai.oneflow_fixes import internals


def test_tracing_is_noticed():
    seen = []

    class Graph(nn.Graph):
        def build(self, x):
            seen.append(internals.is_tracing())
            return x * 2.0

    Graph()(flow.ones(2))
    assert (seen, internals.is_tracing()) == ([True], False)


def test_place_is_read_from_local_and_global_tensors():
    x = flow.ones(2)
    assert cpu.is_on_cpu(x)
    assert cpu.is_on_cpu(x.to_global(CPU, SPLIT))
