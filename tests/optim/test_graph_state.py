"""The optimizer state of a graph; tests/engine/test_switching.py carries that of every optimizer
from one mode to the other.
"""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn, optim
from refusals import refused

from libai.engine.optimizer_state import OptimizerState
from libai.optim import export_state, graph_state_names


def test_an_optimizer_of_the_users_own_is_refused():
    class Lion(optim.Optimizer):
        def step(self, closure=None):
            return None

    with refused("Lion is not an optimizer of OneFlow"):
        graph_state_names(Lion(list(nn.Linear(2, 2).parameters()), {"lr": 0.1}))


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_without_gradient_keeps_its_initial_state():
    class TrainGraph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x):
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    model, x = nn.Linear(8, 4), flow.ones(2, 8)
    model.unused = nn.Linear(8, 4)
    optimizer = optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)
    graph, state = TrainGraph(), OptimizerState(model, optimizer)
    graph.build_graph(x)
    state.lend(graph, "model")
    graph.finish_complie_and_init_runtime()
    state.take(graph, "model", False)
    graph(x)
    tensors, _ = export_state(optimizer, model.named_parameters())
    assert set(np.unique(tensors["unused.weight/sum"].numpy())) == {0.25}
    assert (tensors["weight/sum"].numpy() > 0.25).any()
