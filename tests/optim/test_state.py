"""The canonical optimizer state in eager mode: complete, exact, and never half loaded."""

import numpy as np
import oneflow as flow
from oneflow import nn, optim
from refusals import refused

from libai.optim import export_state, import_state

FEATURES = flow.tensor(np.random.RandomState(0).randn(8, 4).astype("float32"))


def build_model():
    """Two layers, and a learned temperature: numpy makes an array of one element of it."""
    flow.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model.register_parameter("temperature", nn.Parameter(flow.tensor(1.0)))
    return model


def train(model, optimizer, num_iters):
    losses = []
    for _ in range(num_iters):
        x = FEATURES * model.temperature
        for layer in model.children():
            x = layer(x)
        loss = (x**2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.numpy().item())
    return losses


def as_arrays(tensors):
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def test_frozen_parameters_have_no_state():
    """Until they are trained: then their state is kept, also while they are frozen again."""
    model = build_model()
    model[0].weight.requires_grad_(False)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 1)
    tensors, scalars = export_state(optimizer, model.named_parameters())
    trained = {"0.bias", "2.weight", "2.bias", "temperature"}
    assert {name.split("/")[0] for name in tensors} == trained
    import_state(optimizer, model.named_parameters(), as_arrays(tensors), scalars)
    model[2].weight.requires_grad_(False)
    kept, scalars = export_state(optimizer, model.named_parameters())
    assert kept.keys() == tensors.keys()
    import_state(optimizer, model.named_parameters(), as_arrays(kept), scalars)
    model[0].weight.requires_grad_(True)
    with refused(r"2 missing: 0\.weight/exp_avg"):
        import_state(optimizer, model.named_parameters(), as_arrays(kept), scalars)


def test_differences_are_listed_exactly_and_nothing_is_loaded():
    model = build_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    tensors, scalars = export_state(optimizer, model.named_parameters())
    arrays = as_arrays(tensors)
    del arrays["0.bias/momentum_buf"]
    arrays["0.weight/momentum_buf"] = np.zeros((9, 4), "float32")
    arrays["tail.weight/momentum_buf"] = np.zeros(3, "float32")
    before = as_arrays(tensors)
    text = (
        r"1 missing: 0\.bias/momentum_buf; 1 unexpected: tail\.weight/momentum_buf; "
        r"1 mis-shaped: 0\.weight/momentum_buf \(saved \(9, 4\), wanted \(8, 4\)\)\."
    )
    with refused(text):
        import_state(optimizer, model.named_parameters(), arrays, {"step": 7})
    after, scalars_after = export_state(optimizer, model.named_parameters())
    assert scalars_after == scalars
    for name, array in before.items():
        assert np.array_equal(after[name].numpy(), array)


class CountingSGD(optim.Optimizer):
    """An optimizer of a user's own: a tensor and a number per parameter, and a number of its
    own.
    """

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self._state["temperature"] = 1.0
        for group in self.param_groups:
            for parameter in group.parameters:
                self._state[parameter] = {"mean": flow.zeros_like(parameter), "count": 0}

    def step(self, closure=None):
        with flow.no_grad():
            for group in self.param_groups:
                for parameter in group.parameters:
                    state = self._state[parameter]
                    state["count"] += 1
                    state["mean"] = 0.9 * state["mean"] + 0.1 * parameter.grad
                    parameter.data = parameter - group["lr"] / state["count"] * state["mean"]
        self._state["temperature"] *= 0.5
        self._state["step"] += 1


def test_an_optimizer_of_the_users_own_resumes_bitwise():
    """tests/engine/test_switching.py resumes every optimizer of OneFlow."""
    model = build_model()
    whole = train(model, CountingSGD(model.parameters(), 0.5), 8)
    model = build_model()
    optimizer = CountingSGD(model.parameters(), 0.5)
    losses = train(model, optimizer, 4)
    tensors, scalars = export_state(optimizer, model.named_parameters())
    resumed = CountingSGD(model.parameters(), 0.5)
    import_state(resumed, model.named_parameters(), as_arrays(tensors), scalars)
    assert losses + train(model, resumed, 4) == whole
    assert (scalars["step"], scalars["0.weight/count"]) == (4, 4)
    assert scalars["temperature"] == 0.0625
