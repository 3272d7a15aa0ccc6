"""Optimizer state survives a change of mode: eager N + graph N = eager 2N, and back, for every
optimizer.
"""

import numpy as np
import oneflow as flow
import pytest
from marks import slow_but
from oneflow import nn, optim

from libai.engine.optimizer_state import OptimizerState
from libai.optim import export_state, graph_state_names, import_state
from libai.utils.errors import UserError

# Eager against graph: Adam's graph computes its bias corrections in float32 (measured 2e-6), the
# rest agree to 1e-6.
TOLERANCE = 1e-5

OPTIMIZERS = {
    "sgd": (optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "adam_amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adam_uncorrected": (optim.Adam, {"lr": 1e-2, "do_bias_correction": False}),
    "adamw": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw_amsgrad": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "lamb": (optim.LAMB, {"lr": 1e-2, "weight_decay": 0.1}),
    "lamb_l2": (optim.LAMB, {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.01}),
    "rmsprop_centered": (optim.RMSprop, {"lr": 1e-3, "centered": True}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
}
NUM_ITERS = 5

_RNG = np.random.RandomState(0)
FEATURES = flow.tensor(_RNG.randn(16, 8).astype("float32"))
LABELS = flow.tensor(_RNG.randint(0, 4, 16))


class TrainGraph(nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, features, labels):
        loss = nn.functional.cross_entropy(self.model(features), labels)
        loss.backward()
        return loss


def build_model():
    flow.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def build_optimizer(kind, model, num_groups):
    target, options = OPTIMIZERS[kind]
    if num_groups == 1:
        return target(model.parameters(), **options)
    groups = [
        {"params": list(model[0].parameters()), "lr": options["lr"] / 2},
        {"params": list(model[2].parameters())},
    ]
    return target(groups, **options)


def eager_losses(model, optimizer, num_iters):
    losses = []
    for _ in range(num_iters):
        loss = nn.functional.cross_entropy(model(FEATURES), LABELS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.numpy().item())
    return losses


def graph_losses(graph, num_iters):
    losses = [graph(FEATURES, LABELS).numpy().item() for _ in range(num_iters)]
    return losses


def max_relative_difference(actual, expected):
    return np.max(np.abs(np.array(actual) - expected) / np.abs(expected))


def losses_of_halves(kind, num_groups, carry_over):
    """Return the losses of two halves of a run, and those of the whole run in eager mode."""
    model = build_model()
    expected = eager_losses(model, build_optimizer(kind, model, num_groups), 2 * NUM_ITERS)
    model = build_model()
    first, second = (build_optimizer(kind, model, num_groups) for _ in range(2))
    return carry_over(model, first, second), expected


def compiled(model, optimizer):
    """Return a graph that uses the tensors in the optimizer."""
    graph = TrainGraph(model, optimizer)
    state = OptimizerState(model, optimizer)
    graph.build_graph(FEATURES, LABELS)
    state.lend(graph, "model")
    graph.finish_complie_and_init_runtime()
    state.take(graph, "model", False)
    return graph


def from_eager_to_graph(model, optimizer, fresh):
    losses = eager_losses(model, optimizer, NUM_ITERS)
    return losses + graph_losses(compiled(model, optimizer), NUM_ITERS)


def from_graph_to_eager(model, optimizer, fresh):
    """The optimizer itself continues."""
    losses = graph_losses(compiled(model, optimizer), NUM_ITERS)
    optimizer._state["step"] = NUM_ITERS
    optimizer.zero_grad(set_to_none=True)
    return losses + eager_losses(model, optimizer, NUM_ITERS)


def from_graph_to_another_optimizer(model, optimizer, fresh):
    losses = graph_losses(compiled(model, optimizer), NUM_ITERS)
    optimizer._state["step"] = NUM_ITERS
    state = export_state(optimizer, model.named_parameters())
    import_state(fresh, model.named_parameters(), *state)
    fresh.zero_grad(set_to_none=True)
    return losses + eager_losses(model, fresh, NUM_ITERS)


def without_state(model, optimizer, fresh):
    return eager_losses(model, optimizer, NUM_ITERS) + eager_losses(model, fresh, NUM_ITERS)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("kind", slow_but(OPTIMIZERS, "momentum", "adamw"))
@pytest.mark.parametrize(
    "carry_over", [from_eager_to_graph, from_graph_to_eager, from_graph_to_another_optimizer]
)
def test_state_continues_in_the_other_mode(carry_over, kind, num_groups):
    assert max_relative_difference(*losses_of_halves(kind, num_groups, carry_over)) < TOLERANCE


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_forgotten_state_is_seen_by_the_comparison(kind):
    """Negative control: the tolerance above would not hide a state that was not carried over."""
    assert max_relative_difference(*losses_of_halves(kind, 1, without_state)) > 10 * TOLERANCE


def test_a_missing_tensor_and_another_shape_are_refused():
    model = build_model()
    optimizer = build_optimizer("adam", model, 1)
    tensors, scalars = export_state(optimizer, model.named_parameters())
    other = {**tensors, "2.bias/exp_avg_sq": np.zeros(5, np.float32)}
    with pytest.raises(
        UserError, match=r"1 mis-shaped: 2.bias/exp_avg_sq \(saved \(5,\), wanted \(4,\)\)"
    ):
        import_state(optimizer, model.named_parameters(), other, scalars)
    del tensors["2.bias/exp_avg_sq"]
    with pytest.raises(UserError, match="1 missing: 2.bias/exp_avg_sq"):
        import_state(optimizer, model.named_parameters(), tensors, scalars)


def test_an_optimizer_of_the_users_own_is_refused():
    class Lion(optim.Optimizer):
        def step(self, closure=None):
            return None

    with pytest.raises(UserError, match="Lion is not an optimizer of OneFlow"):
        graph_state_names(Lion(list(build_model().parameters()), {"lr": 0.1}))


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_without_gradient_keeps_its_initial_state():
    model = nn.Linear(8, 4)
    model.unused = nn.Linear(8, 4)
    optimizer = optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)
    graph_losses(compiled(model, optimizer), 1)
    tensors, _ = export_state(optimizer, model.named_parameters())
    assert set(np.unique(tensors["unused.weight/sum"].numpy())) == {0.25}
    assert (tensors["weight/sum"].numpy() > 0.25).any()
