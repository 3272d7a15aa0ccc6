"""The worked example: it equals the eager step, and forgetting its precaution shows."""

from __future__ import annotations

import doctest

import numpy as np
import oneflow as flow

from libai.models import MLP, custom_graph
from libai.models.custom_graph import CustomGraph, eager_step

IMAGES = flow.tensor(np.random.RandomState(0).rand(8, 6).astype(np.float32))
LABELS = flow.tensor(np.random.RandomState(1).randint(0, 3, 8))


def build() -> tuple[MLP, flow.optim.Optimizer]:
    flow.manual_seed(1)
    model = MLP(6, (8,), 3)
    return model, flow.optim.SGD(model.parameters(), lr=0.5)


def losses_of_graph(graph: CustomGraph) -> list[float]:
    return [graph(IMAGES, LABELS).item() for _ in range(5)]


def test_compiled_steps_equal_eager_steps() -> None:
    model, optimizer = build()
    eager = [eager_step(model, optimizer, IMAGES, LABELS).item() for _ in range(5)]
    np.testing.assert_allclose(losses_of_graph(CustomGraph(*build())), eager, rtol=1e-6)
    assert eager[-1] < eager[0]


def test_gradients_left_from_an_eager_step_do_not_stop_the_graph() -> None:
    model, optimizer = build()
    eager_step(model, optimizer, IMAGES, LABELS)
    losses = losses_of_graph(CustomGraph(model, optimizer))
    assert losses[-1] < losses[0]


def test_without_the_precaution_the_graph_never_learns() -> None:
    """The negative control: gradients of zeros, present when the graph is compiled."""
    model, optimizer = build()
    graph = CustomGraph(model, optimizer)
    eager_step(model, optimizer, IMAGES, LABELS)
    losses = losses_of_graph(graph)
    assert losses[0] == losses[-1]


def test_the_example_in_its_docstring_runs() -> None:
    assert doctest.testmod(custom_graph).failed == 0
