"""Dropout and DropPath: rates, gradients, equality of the modes, of accumulation, and of one and
two processes.
"""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from refusals import refused

from libai.layers.dropout import Dropout, DropPath
from libai.layers.random import assign_layer_ids, fold, random_context

KEY = fold(7, 3, 1)
CPU, SPLIT, BROADCAST = flow.placement("cpu", [0]), flow.sbp.split(0), flow.sbp.broadcast
SHAPE = (8, 6, 33)


def make_model():
    """Return a model with two dropouts of one shape and a drop path, with fixed weights."""
    model = nn.Sequential(Dropout(0.3), Dropout(0.3), DropPath(0.4), nn.Linear(33, 5))
    with flow.no_grad():
        for parameter in model.parameters():
            parameter.copy_(flow.ones(*parameter.shape) * 0.01)
    assign_layer_ids(model)
    return model


def make_drops():
    """Return only the random layers of `make_model`, without sums whose last bits depend on the
    number of rows.
    """
    model = make_model()
    return nn.Sequential(model[0], model[1], model[2])


class Forward(nn.Graph):
    """The model in training mode, with the key as an input."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x, key):
        with random_context(key):
            return self.model(x)


def run_eagerly(model, x, key=KEY, data_rank=0):
    with random_context(key, data_rank):
        return model(x).numpy()


def numbers(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("layer", [Dropout, DropPath])
def test_rate_is_binomial_and_the_rest_is_scaled(layer, p):
    count, dropped = 0, 0
    drop = layer(p)
    for iteration in range(20):
        with random_context(fold(0, iteration, 0)):
            y = drop(
                flow.ones(64 if layer is Dropout else 4096, *((64,) if layer is Dropout else (1,)))
            ).numpy()
        kept = y[y != 0]
        assert np.allclose(kept, 1.0 / (1.0 - p), rtol=1e-6)
        count, dropped = count + y.size, dropped + y.size - kept.size
    assert abs(dropped - p * count) / np.sqrt(count * p * (1 - p)) < 5


def test_drop_path_drops_whole_samples():
    y = run_eagerly(DropPath(0.5), flow.ones(64, 3, 5))
    samples = y.reshape(64, -1)
    assert {tuple(np.unique(row)) for row in samples} == {(0.0,), (2.0,)}


@pytest.mark.parametrize("layer", [Dropout, DropPath])
def test_identity_in_eval_mode_and_at_rate_zero(layer):
    x = flow.tensor(numbers())
    assert layer(0.5).eval()(x) is x
    assert layer(0.0)(x) is x


@pytest.mark.parametrize("layer", [Dropout, DropPath])
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_an_impossible_rate_is_refused(layer, p):
    with refused(rf"{layer.__name__}\.p=.*0 <= .* <= 1"):
        layer(p)


def test_gradient_passes_through_the_same_mask():
    x = flow.tensor(numbers(), requires_grad=True)
    grad = flow.tensor(numbers(seed=1))
    for layer in (Dropout(0.4), DropPath(0.4)):
        x.grad = None
        with random_context(KEY):
            y = layer(x)
        y.backward(grad)
        mask = np.where(y.numpy() == 0, 0.0, 1.0 / 0.6).astype(np.float32)
        assert np.allclose(x.grad.numpy(), grad.numpy() * mask, rtol=1e-6)


def test_all_ways_to_run_give_equal_bits():
    model, x = make_model(), flow.tensor(numbers())
    expected = run_eagerly(model, x)
    key = flow.tensor([KEY], dtype=flow.int64)
    assert (run_eagerly(model, x, key) == expected).all()
    assert (Forward(model)(x, key).numpy() == expected).all()
    x, key = x.to_global(CPU, SPLIT), key.to_global(CPU, BROADCAST)
    model.to_global(CPU, BROADCAST)
    assert (run_eagerly(model, x) == expected).all()
    assert (Forward(model)(x, key).numpy() == expected).all()


def test_two_layers_of_one_model_draw_different_masks():
    model = make_model()
    x = flow.ones(*SHAPE)
    with random_context(KEY):
        first, second = model[0](x).numpy(), model[1](x).numpy()
    assert (first != second).mean() > 0.3
    # negative control: the same id, the same mask
    model[1].layer_id = model[0].layer_id
    with random_context(KEY):
        assert (model[1](x).numpy() == first).all()
