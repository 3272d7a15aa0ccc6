"""What private parts of OneFlow tell."""

import oneflow as flow
from oneflow import nn

from libai.oneflow_fixes import internals


def test_tracing_is_noticed():
    seen = []

    class Graph(nn.Graph):
        def build(self, x):
            seen.append(internals.is_tracing())
            return x * 2.0

    Graph()(flow.ones(2))
    assert (seen, internals.is_tracing()) == ([True], False)
