"""Changes in place that one mode would get wrong: refused before the first update, or as harmless as they look."""

import numpy as np
import oneflow as flow
import oneflow.nn.functional as F
import pytest
from oneflow import nn

from libai.engine import EagerTrainer, GraphTrainer
from libai.engine.hooks import CallbackHook
from libai.utils.errors import UserError

TRAINERS = {"eager": EagerTrainer, "graph": GraphTrainer}
both_modes = pytest.mark.parametrize("mode", TRAINERS)


class Net(nn.Module):
    """Two layers with something between them that a test chooses."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x, y):
        h = self.between(self.first(x), x)
        return {"losses": {"cls": F.cross_entropy(self.second(h), y)}}


def batches():
    rng = np.random.RandomState(0)
    return [{"x": rng.randn(8, 6).astype(np.float32), "y": rng.randint(0, 3, 8)} for _ in range(3)]


def build(model):
    rng = np.random.RandomState(1)
    for parameter in model.parameters():
        parameter.data.copy_(flow.tensor(0.4 * rng.randn(*parameter.shape).astype(np.float32)))
    return model, flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def losses_of(mode, model, **options):
    lines = []
    trainer = TRAINERS[mode](*build_args(model), device="cpu", **options)
    trainer.register_hooks([CallbackHook(after_step=lambda t: lines.append(t.fetch_metrics()["train/loss"]))])
    trainer.train(0, 3)
    return lines


def build_args(model):
    model, optimizer = build(model)
    return model, batches(), optimizer


def plain_loop(model):
    model, optimizer = build(model)
    losses = []
    for batch in batches():
        loss = model(**{name: flow.tensor(value) for name, value in batch.items()})["losses"]["cls"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def relu_then_add(h, x):
    h = F.relu(h, inplace=True)
    h += 1
    return h


def product_then_zeroed(h, x):
    square = h * h
    h[:, :2] = 0
    return square + h


@both_modes
@pytest.mark.parametrize(
    ("between", "line"),
    [
        (relu_then_add, "`h += 1`"),
        (product_then_zeroed, "`h[:, :2] = 0`"),
    ],
)
def test_a_change_in_place_of_what_backward_reads_is_refused(mode, between, line):
    """PyTorch raises an error here; OneFlow 0.9 computes a wrong gradient eagerly, and another one in a graph."""
    model = Net(between)
    with pytest.raises(UserError) as error:
        losses_of(mode, model)
    assert line in str(error.value).split("changes what")[0]
    assert f"{__name__.rpartition('.')[2]}.py" in str(error.value)
    start = dict(build(Net(between))[0].named_parameters())
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.numpy(), start[name].numpy()), "no update was made"


def relu_in_place(h, x):
    return F.relu(h, inplace=True)


def residual(h, x):
    """The sum keeps its terms, of which its derivative needs the shapes only."""
    a = F.relu(h)
    b = a + h
    h *= 2.0
    return F.relu(b, inplace=True)


def into_new(h, x):
    out = flow.zeros_like(h)
    out[:, :4] = h[:, 4:]
    out[:, 4:] = h[:, :4]
    return out


@both_modes
@pytest.mark.parametrize("between", [relu_in_place, residual, into_new])
def test_a_change_in_place_that_no_derivative_reads_trains_as_the_plain_loop_does(mode, between):
    np.testing.assert_allclose(losses_of(mode, Net(between)), plain_loop(Net(between)), rtol=1e-6)


def through_view(h, x):
    h = h * 1
    h.view(-1, 4).mul_(2)
    return h


def test_a_graph_is_refused_that_loses_a_change_through_a_view():
    with pytest.raises(UserError, match="the loss 'cls' of the first batch is .* compiled and .* op by op") as error:
        losses_of("graph", Net(through_view))
    assert f"loses ({__file__}:" in str(error.value) and "`h.view(-1, 4).mul_(2)`" in str(error.value)
    np.testing.assert_allclose(losses_of("eager", Net(through_view)), plain_loop(Net(through_view)), rtol=1e-6)


class LeansOnTheMode(flow.autograd.Function):
    """Another gradient while a graph is traced."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.05 if grad.is_lazy else 1)


def gradient_of_the_mode(h, x):
    return LeansOnTheMode.apply(h)


OPTIMIZERS = {
    "sgd": lambda parameters: flow.optim.SGD(parameters, lr=0.1, weight_decay=0.1),
    "momentum": lambda parameters: flow.optim.SGD(parameters, lr=0.0, momentum=0.9),
    "adamw": lambda parameters: flow.optim.AdamW(parameters, lr=1e-3),
}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("momentum", {}), ("adamw", {"max_grad_norm": 100.0}), ("sgd", {"num_accumulation_steps": 3})],
)
def test_a_graph_is_refused_whose_gradients_are_others(optimizer, options):
    """The first losses are right; the weights move otherwise, or with a rate of 0 the momentum."""

    def train(between):
        model, _ = build(Net(between))
        GraphTrainer(model, batches(), OPTIMIZERS[optimizer](model.parameters()), device="cpu", **options).train(0, 1)

    with pytest.raises(UserError, match="the gradient of first.* differs by about .* % compiled and op by op"):
        train(gradient_of_the_mode)
    train(relu_in_place)


def test_no_first_step_is_compared_where_that_is_left_out():
    model, optimizer = build(Net(gradient_of_the_mode))
    GraphTrainer(model, batches(), optimizer, device="cpu", check_first_step=False).train(0, 2)
