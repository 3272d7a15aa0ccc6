"""Optimizer updates equal the updates by OneFlow's kernels bit for bit, in both modes."""

from functools import partial

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from oneflow import nn

#: test name -> (operation, optimizer)
OPTIMIZERS = {
    "sgd": ("sgd_update", partial(flow.optim.SGD, weight_decay=0.1)),
    "momentum": ("momentum_update", partial(flow.optim.SGD, momentum=0.9, weight_decay=0.1)),
    "nesterov": ("momentum_update", partial(flow.optim.SGD, momentum=0.9, nesterov=True)),
    "adam": ("adam_update", partial(flow.optim.Adam, weight_decay=0.1)),
    "adamw": ("adam_update", partial(flow.optim.AdamW, weight_decay=0.1)),
    "amsgrad": ("adam_update", partial(flow.optim.AdamW, amsgrad=True)),
    "lamb": ("lamb_update", partial(flow.optim.LAMB, weight_decay=0.1)),
    "lamb, l2": ("lamb_update", partial(flow.optim.LAMB, weight_decay=0.1, adam_w_mode=False)),
}


def train(build_optimizer, mode):
    """Return the weights after 5 updates, with gradients of very different sizes."""
    rng = np.random.default_rng(0)
    start = [rng.standard_normal(shape).astype(np.float32) for shape in ((33, 17), (1,), (5,))]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(flow.tensor(array)) for array in start])

        def forward(self, scale):
            weights = [self.weights[i] for i in range(3)]
            return sum(((w * w * w).sum() * scale for w in weights), start=scale * 0.0)

    model = Model()
    optimizer = build_optimizer(model.parameters(), lr=1e-2)

    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, scale):
            loss = self.model(scale)
            loss.backward()
            return loss

    graph = Graph() if mode == "graph" else None
    for size in (1.0, 1e-3, 100.0, 0.0, 1e-12):
        scale = flow.tensor(size, dtype=flow.float32)
        if graph is not None:
            graph(scale)
            continue
        optimizer.zero_grad()
        model(scale).backward()
        optimizer.step()
    return np.concatenate([p.numpy().reshape(-1) for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:Only Momentum")
@pytest.mark.parametrize(
    "name, mode",
    [
        *((name, "eager") for name in OPTIMIZERS),
        *((name, "graph") for name in ("sgd", "nesterov", "adamw", "lamb")),
    ],
)
def test_updates_are_oneflows(level, library, stock, name, mode):
    op, build_optimizer = OPTIMIZERS[name]
    before = library.calls()[op]
    found = train(build_optimizer, mode)
    assert library.calls()[op] - before == 15
    expected = stock(lambda: train(build_optimizer, mode))
    assert library.calls()[op] - before == 15, "the second run used OneFlow's own kernel"
    assert np.isfinite(found).all()
    if (
        op == "lamb_update"
    ):  # OneFlow adds the squares of a parameter one by one; our sum is more exact
        assert_allclose(found, expected, rtol=2e-6, atol=1e-7)
    else:
        assert_array_equal(found, expected)
