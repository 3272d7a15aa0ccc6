"""The canonical optimizer state in eager mode: complete, exact, and never half loaded."""

import numpy as np
import oneflow as flow
import pytest
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


BUILDERS = {
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam_amsgrad": lambda parameters: optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.01),
    "lamb": lambda parameters: optim.LAMB(parameters, lr=0.01),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.01, lr_decay=0.1),
    "rmsprop_centered": lambda parameters: optim.RMSprop(parameters, lr=0.001, centered=True),
    "adadelta": lambda parameters: optim.Adadelta(parameters, lr=1.0),
}


def test_frozen_parameters_have_no_state():
    model = build_model()
    model[0].weight.requires_grad_(False)
    optimizer = BUILDERS["adamw"](
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    tensors, _ = export_state(optimizer, model.named_parameters())
    assert {name.split("/")[0] for name in tensors} == {
        "0.bias",
        "2.weight",
        "2.bias",
        "temperature",
    }


def test_differences_are_listed_exactly_and_nothing_is_loaded():
    model = build_model()
    optimizer = BUILDERS["momentum"](model.parameters())
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


def resume_halfway(build):
    """Compare 8 updates with 4 updates, a resume through arrays and 4 more; return the saved
    scalars.
    """
    model = build_model()
    whole = train(model, build(model.parameters()), 8)

    model = build_model()
    optimizer = build(model.parameters())
    fresh, _ = export_state(optimizer, model.named_parameters())
    losses = train(model, optimizer, 4)
    tensors, scalars = export_state(optimizer, model.named_parameters())
    assert {name: one.shape for name, one in fresh.items()} == {
        name: one.shape for name, one in tensors.items()
    }
    resumed = build(model.parameters())
    import_state(resumed, model.named_parameters(), as_arrays(tensors), scalars)
    assert losses + train(model, resumed, 4) == whole
    return scalars


@pytest.mark.parametrize("kind", BUILDERS)
def test_resume_through_arrays_is_bitwise(kind):
    assert resume_halfway(BUILDERS[kind])["step"] == 4


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
    scalars = resume_halfway(lambda parameters: CountingSGD(parameters, 0.5))
    assert scalars["0.weight/count"] == 4
    assert scalars["temperature"] == 0.0625
