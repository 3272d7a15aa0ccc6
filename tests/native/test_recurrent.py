"""A recurrent network is one operation forward and one backward, with the values of OneFlow's own
in float64, and the same bits in both modes.
"""

from contextlib import nullcontext

import numpy as np
import oneflow as flow
import pytest
import toy
from marks import nightly_but
from numpy.testing import assert_allclose, assert_array_equal
from oneflow import nn

from libai.layers.random import assign_layer_ids, random_context

STEPS, BATCH, WIDTH = 7, 5, 6
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}
FORMS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "three layers, both directions, batch first": {
        "num_layers": 3,
        "bidirectional": True,
        "batch_first": True,
    },
    "no bias": {"bias": False, "num_layers": 2},
}


def build(kind, hidden=4, **options):
    if KINDS[kind] is nn.RNN:
        options["nonlinearity"] = kind
    network = KINDS[kind](WIDTH, hidden, **options)
    for index, weight in enumerate(network.parameters()):
        values = np.random.default_rng(index).normal(0, 0.4, tuple(weight.shape))
        weight.data.copy_(flow.tensor(values.astype(np.float32)))
    return network


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def results(network, dtype, has_states=True, steps=STEPS, batch=BATCH):
    """Return the outputs and all gradients of one pass in float64, those of x and states first."""
    network = network.to(dtype)
    first, second = (batch, steps) if network.batch_first else (steps, batch)
    directions = 2 if network.bidirectional else 1
    state = (network.num_layers * directions, batch, network.hidden_size)
    num_states = has_states * (2 if network.mode == "LSTM" else 1)
    inputs = [
        flow.tensor(numbers(*shape, seed=seed), dtype=dtype, requires_grad=True)
        for seed, shape in enumerate([(first, second, WIDTH), *[state] * num_states])
    ]
    given = [tuple(inputs[1:])] if num_states == 2 else inputs[1:]
    y, last = network(inputs[0], *given)
    outputs = [y, *(last if isinstance(last, tuple) else [last])]
    factors = [flow.tensor(numbers(*one.shape, seed=9), dtype=dtype) for one in outputs]
    sum((one * factor).sum() for one, factor in zip(outputs, factors)).backward()
    gradients = [one.grad for one in [*inputs, *network.parameters()]]
    return [one.detach().numpy().astype(np.float64) for one in [*outputs, *gradients]]


def assert_close(found, expected):
    assert len(found) == len(expected)
    for value, right in zip(found, expected):
        assert_allclose(value, right, rtol=0, atol=5e-6 * abs(right).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_states", [True, False], ids=["states", "zeros"])
def test_outputs_and_gradients_are_those_of_float64(level, counted, kind, form, has_states):
    network = build(kind, **FORMS[form])
    found = results(network, flow.float32, has_states)
    counted("libai_recurrent", "libai_recurrent_grad")
    assert_close(found, results(build(kind, **FORMS[form]), flow.float64, has_states))


@pytest.mark.parametrize(
    "hidden, steps, batch", [(2, 3, 1), (5, 1, 1), (33, 4, 1), (64, 9, 16), (17, 3, 40)]
)
def test_any_size_is_computed(counted, hidden, steps, batch):
    found = results(build("gru", hidden), flow.float32, steps=steps, batch=batch)
    counted("libai_recurrent")
    assert_close(found, results(build("gru", hidden), flow.float64, steps=steps, batch=batch))


class Tagger(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.body = build(kind, batch_first=True, **options)
        self.head = nn.Linear(4 * (2 if self.body.bidirectional else 1), 2)

    def forward(self, x, y):
        return ((self.head(self.body(x)[0]) - y) ** 2).mean()


def batch(i):
    return {"x": numbers(BATCH, STEPS, WIDTH, seed=i), "y": numbers(BATCH, STEPS, 2, seed=99 + i)}


MODELS = {
    "lstm with dropout": ("lstm", {"num_layers": 3, "dropout": 0.4, "bidirectional": True}),
    "gru with dropout": ("gru", {"num_layers": 2, "dropout": 0.2}),
    "lstm": ("lstm", {}),
    "rnn": ("tanh", {"num_layers": 2}),
}


@pytest.mark.parametrize("name", nightly_but(MODELS, "lstm with dropout", "gru with dropout"))
def test_both_modes_have_the_same_bits_and_follow_the_seed(counted, name):
    kind, options = MODELS[name]
    weights = {}
    for mode, seed in (("eager", 1), ("graph", 1), ("eager", 2)):
        model = toy.seeded(Tagger(kind, **options))
        optimizer = flow.optim.AdamW(model.parameters(), lr=0.01)
        toy.trained_losses(mode, model, optimizer, batch, 3, seed=seed)
        weights[mode, seed] = toy.flat_weights(model)
    counted("libai_recurrent_grad")
    assert_array_equal(weights["eager", 1], weights["graph", 1])
    drops = "dropout" in options
    assert (weights["eager", 1] != weights["eager", 2]).any() == drops


@pytest.mark.parametrize("is_in_trainer", [True, False])
def test_dropout_between_layers_follows_the_seed(is_in_trainer):
    """The key of a trainer, or else the seed of OneFlow."""
    network = build("lstm", num_layers=2, dropout=0.5)
    assign_layer_ids(network)
    x = flow.tensor(numbers(STEPS, BATCH, WIDTH))

    def run(seed):
        flow.manual_seed(seed)
        with random_context(seed) if is_in_trainer else nullcontext():
            return network(x)[0].numpy()

    assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()
    network.eval()
    assert_array_equal(run(1), run(2))


def test_networks_that_do_not_fit_are_computed_by_oneflow(library):
    """Projections get no mask, which OneFlow would take for a weight."""
    before = library.calls()["libai_recurrent"]
    network = nn.LSTM(WIDTH, 4, 2, proj_size=3, dropout=0.5)
    assign_layer_ids(network)
    assert network(flow.tensor(numbers(STEPS, BATCH, WIDTH)))[0].shape[-1] == 3
    assert library.calls()["libai_recurrent"] == before


def test_wrong_shapes_raise_an_error():
    network = build("gru")
    weights = list(network.parameters())
    x = flow.tensor(numbers(STEPS, BATCH, WIDTH))
    for state, first in (((BATCH + 1, 4), 6), ((BATCH, 3), 6), ((BATCH, 4), 5)):
        given = [flow.zeros(12, first), *weights[1:]]
        with pytest.raises(RuntimeError):
            flow._C.gru(x, flow.zeros(1, *state), given, True, 1, 0.0, True, False, False)[
                0
            ].numpy()


def test_the_two_biases_have_gradients_of_their_own():
    """They are equal, and clipping in place must not reach one of them twice."""
    network = build("lstm")
    network(flow.tensor(numbers(STEPS, BATCH, WIDTH)))[0].sum().backward()
    first, second = network.bias_ih_l0.grad, network.bias_hh_l0.grad
    before = second.numpy().copy()
    first.mul_(2.0)
    assert_array_equal(second.numpy(), before)


def test_a_backward_pass_works_after_the_kernels_were_switched_off(library):
    network = build("lstm")
    y = network(flow.tensor(numbers(STEPS, BATCH, WIDTH)))[0]
    library.enable(False)
    try:
        y.sum().backward()
        assert np.isfinite(network.weight_hh_l0.grad.numpy()).all()
    finally:
        library.enable(True)


def test_a_forward_without_a_backward_pass_keeps_no_memory():
    """An output holds its history, which must not hold the output."""
    import gc

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    network = nn.LSTM(64, 256, batch_first=True)
    x = flow.ones(16, 32, 64)
    for _ in range(5):
        network(x)[0].sum().numpy()
    before = resident()
    for _ in range(60):  # 60 times 10 MB
        network(x)[0].sum().numpy()
    gc.collect()
    assert resident() - before < 200 * 2**20


def test_cells_and_packed_sequences_are_said_to_be_slow(caplog):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.body = nn.GRUCell(WIDTH, 4), build("gru")

        def forward(self, x, y):
            packed = nn.utils.rnn.pack_padded_sequence(x, flow.tensor([7, 5, 3]), batch_first=False)
            state = flow.zeros(3, 4)
            for row in x:
                state = self.cell(row, state)
            return (state**2).mean() + (self.body(packed)[1] ** 2).mean() + 0 * y.mean()

    model = Loop()
    data = lambda i: {"x": numbers(STEPS, 3, WIDTH), "y": numbers(STEPS, 3)}  # noqa: E731
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    toy.trained_losses("eager", model, optimizer, data, 1, rehearse=0)
    assert "cell: a recurrent cell takes about ten operations for each step" in caplog.text
    assert "GRU reads packed sequences, which OneFlow 0.9 computes step by step" in caplog.text
