"""The optimizer state of a graph; tests/engine/test_switching.py carries that of every optimizer
from one mode to the other.
"""

import numpy as np
from oneflow import nn, optim
from parity_variants import WithUnused
from refusals import refused
from toy import make_trainer

from libai.optim import named_graph_state


def test_an_optimizer_of_the_users_own_is_refused():
    class Lion(optim.Optimizer):
        def step(self, closure=None):
            return None

    model = nn.Linear(2, 2)
    lion = Lion(list(model.parameters()), {"lr": 0.1})
    with refused("Lion is not an optimizer of OneFlow"):
        next(named_graph_state(lion, "model", model.named_parameters()))


def test_a_parameter_without_gradient_keeps_its_initial_state():
    def adagrad(model):
        return optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)

    trainer = make_trainer("graph", model=WithUnused, optimizer=adagrad)
    trainer.train(0, 1)
    tensors, _ = trainer.optimizer_state.export()
    assert set(np.unique(tensors["unused.weight/sum"].numpy())) == {0.25}
    assert (tensors["a.weight/sum"].numpy() > 0.25).any()
