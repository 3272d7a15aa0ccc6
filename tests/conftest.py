"""What all tests share: tiny models and data, both modes as a parameter, launches with a time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `import toy`, `import jobs` from any test


@pytest.fixture(scope="session", autouse=True)
def _protected_graph_launches():
    """Launch one graph through libai first: many tests launch tiny ones by hand, which OneFlow 0.9 may crash on
    (docs/decisions/0006-graph-launch-race.md)."""
    import oneflow as flow
    from oneflow import nn

    from libai.engine.graphs import EvalGraph

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    EvalGraph(Model())({"x": flow.ones(2, 2)}).numpy()


@pytest.fixture(params=["eager", "graph"])
def mode(request):
    """Both execution modes."""
    return request.param
