"""A hook may change any value compiled into a graph: the compiled run trains like the eager run."""

import logging
import re
from types import SimpleNamespace

import numpy as np
import oneflow as flow
import pytest
from numpy.testing import assert_allclose
from oneflow import nn
from refusals import refused
from toy import flat_weights

from libai.engine import EagerTrainer, GraphTrainer, HookBase
from libai.engine.compiled import guards

ITERATIONS = 14
TRAINERS = {"eager": EagerTrainer, "graph": GraphTrainer}
FACTOR = 1.0


class Activation:
    """A function with a setting of its own, and a setting that all instances share."""

    shared = 1.0

    def __init__(self):
        self.factor = 1.0

    def __call__(self, h):
        return flow.tanh(h) * self.factor


class Model(nn.Module):
    """Reads Python values in `forward`, also through methods and properties, from submodules,
    classes and objects.
    """

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.dropout = nn.Identity()
        self.dropout.shift = 0.0
        self.scale, self.use_l1, self.powers = 1.0, False, (1, 2)
        self.unread, self.slope = 0, 2.0
        self.body.weight.register_hook(lambda grad: grad * self.slope)
        self.weights, self.config = {"a": 1.0}, SimpleNamespace(inner=SimpleNamespace(weight=1.0))
        self.table, self.constant, self.activation = np.ones(2, "float32"), None, Activation()
        self.register_buffer("temperature", flow.ones(()))

    @property
    def factor(self):
        of_containers = self.weights["a"] * self.config.inner.weight * float(self.table[0])
        return of_containers * self.gain * FACTOR * Activation.shared

    def distance(self, difference):
        return difference.abs() if self.use_l1 else difference ** self.powers[1] / self.powers[0]

    def forward(self, x, y=None):
        prediction = (
            self.head(self.activation(self.body(x))) * self.temperature + self.dropout.shift
        )
        loss = self.distance(prediction - y).mean() * self.scale * self.factor
        if self.constant is not None:
            loss = loss * self.constant.sum()
        return {"losses": {"loss": loss}, "prediction": prediction}


def batches():
    random = np.random.RandomState(0)
    return [
        {"x": random.randn(4, 3).astype("float32"), "y": random.randn(4, 1).astype("float32")}
        for _ in range(ITERATIONS)
    ]


def groups(model):
    return [
        {"params": list(part.parameters()), "weight_decay": 0.01}
        for part in (model.body, model.head)
    ]


OPTIMIZERS = {
    "sgd": lambda model: flow.optim.SGD(groups(model), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: flow.optim.AdamW(model.parameters(), lr=0.01),
    "body": lambda model: flow.optim.SGD(groups(model)[:1], lr=0.1),
}


class Change(HookBase):
    """Calls `change(trainer, iteration)` before each step."""

    def __init__(self, change):
        self._change = change

    def before_step(self):
        self._change(self.trainer, self.trainer.iter)


def set_group(key, value):
    return lambda trainer, i: trainer.optimizer.param_groups[0].__setitem__(key, value(i))


def set_on(path, name, value):
    return lambda trainer, i: setattr(dict(trainer.model.named_modules())[path], name, value(i))


def once(change):
    """Call `change(trainer)` before the sixth step."""
    return lambda trainer, i: change(trainer) if i == 5 else None


def between(write):
    """Call `write(trainer, 0.5)` from the sixth step on, and `write(trainer, 1.0)` before that and
    at the end.
    """
    return lambda trainer, i: write(trainer, 0.5 if 5 <= i < ITERATIONS - 1 else 1.0)


def halve_data(trainer):
    trainer.model.head.weight.data = trainer.model.head.weight.data * 0.5


def shifted():
    module = nn.Identity()
    module.shift = 0.5
    return module


def forget_momentum(trainer):
    trainer.optimizer.load_state_dict(OPTIMIZERS["sgd"](trainer.model).state_dict())


def fill_constant(trainer, value):
    if trainer.model.constant is None:
        trainer.model.constant = flow.ones(1)
    trainer.model.constant.fill_(value)


def freeze(trainer, is_frozen):
    trainer.model.body.requires_grad_(not is_frozen)


#: name -> change made by the hook, and allowed number of compilations
CHANGES = {
    "weight decay once": (set_group("weight_decay", lambda i: 0.5 if i >= 5 else 0.01), 1),
    "weight decay rises": (set_group("weight_decay", lambda i: 0.02 * i), 1),
    "loss weight once": (set_on("", "scale", lambda i: 3.0 if i >= 5 else 1.0), 1),
    "loss weight annealed": (set_on("", "scale", lambda i: 1 + 0.1 * i), 1),
    "loss switched": (set_on("", "use_l1", lambda i: i >= 7), 1),
    "number of a submodule": (set_on("dropout", "shift", lambda i: 0.5 if i >= 3 else 0.0), 1),
    "number of a gradient hook": (set_on("", "slope", lambda i: 3.0 if i >= 5 else 1.0), 1),
    "frozen and trained again": (lambda trainer, i: freeze(trainer, 5 <= i < 12), 1),
    "an attribute that forward does not read": (set_on("", "unread", lambda i: i), 0),
    "the rate": (set_group("lr", lambda i: 0.1 / (i + 1)), 0),
}

_handles = []


def hooked_between(trainer, iteration):
    """Halve the output of a layer from iteration 5 on, until iteration 9."""
    if iteration == 5:
        halve = trainer.model.body.register_forward_hook(lambda module, inputs, out: out * 0.5)
        _handles.append(halve)
    elif iteration == 9:
        _handles.pop().remove()


#: the same table for changes outside module attributes
HIDDEN = {
    "an entry of a dict": between(lambda trainer, value: trainer.model.weights.update(a=value)),
    "an object in an object": between(
        lambda trainer, value: setattr(trainer.model.config.inner, "weight", value)
    ),
    "an array in place": between(lambda trainer, value: trainer.model.table.fill(value)),
    "a tensor in place": between(fill_constant),
    "a class attribute": between(lambda trainer, value: setattr(Model, "gain", value)),
    "a global": between(lambda trainer, value: globals().update(FACTOR=value)),
    "a function": once(lambda trainer: setattr(trainer.model, "activation", flow.relu)),
    "a method": once(lambda trainer: setattr(trainer.model, "distance", flow.abs)),
    "an attribute of a callable object": between(
        lambda trainer, v: setattr(trainer.model.activation, "factor", v)
    ),
    "an attribute of a global class": between(
        lambda trainer, value: setattr(Activation, "shared", value)
    ),
    "a module": once(lambda trainer: setattr(trainer.model, "dropout", shifted())),
    "a closure twice": lambda trainer, i: (
        i in (5, 8) and setattr(trainer.model, "activation", lambda h: flow.tanh(h) * i / 8)
    ),
    "a gradient hook": once(
        lambda trainer: trainer.model.head.weight.register_hook(lambda grad: grad * 0.1)
    ),
    "the state of the optimizer": once(forget_momentum),
    "a forward hook": once(
        lambda trainer: trainer.model.body.register_forward_hook(lambda m, x, out: out * 0.5)
    ),
    "a forward hook, removed again": hooked_between,
    "a new buffer": once(lambda trainer: setattr(trainer.model, "temperature", flow.tensor(0.5))),
    "new data of a parameter": once(halve_data),
    "a group taken away": once(lambda trainer: trainer.optimizer.param_groups.pop()),
    "a parameter taken away": once(
        lambda trainer: trainer.optimizer.param_groups[0]._parameters.pop()
    ),
}
CHANGES.update(
    (name, (change, int(name not in ("a new buffer", "the state of the optimizer"))))
    for name, change in HIDDEN.items()
)


QUICK = (
    "weight decay rises",
    "loss switched",
    "frozen and trained again",
    "the rate",
    "a global",
)


def frozen_head():
    model = Model()
    model.head.requires_grad_(False)
    return model


def transposed_body():
    model = Model()
    model.body.weight = nn.Parameter(model.body.weight.detach().t())
    return model


def train(mode, optimizer, change, build=Model, **settings):
    flow.manual_seed(0)
    model = build()
    settings = {"rehearse": 0, **settings}  # the modes are compared with each other
    trainer = TRAINERS[mode](model, batches(), OPTIMIZERS[optimizer](model), **settings)
    trainer.register_hooks([Change(change)])
    trainer.train(0, ITERATIONS // settings.get("num_accumulation_steps", 1))
    return trainer


def weights(trainer):
    return flat_weights(trainer.model)


@pytest.mark.parametrize(
    "name, optimizer",
    [
        *((name, "sgd") for name in QUICK),
        *(
            pytest.param(name, "sgd", marks=pytest.mark.e2e)
            for name in CHANGES
            if name not in QUICK
        ),
        *(
            pytest.param(name, "adam", marks=pytest.mark.e2e)
            for name in ("weight decay rises", "frozen and trained again", "the rate")
        ),
    ],
)
def test_a_change_has_the_same_effect_in_both_modes(name, optimizer, caplog):
    change, most_compilations = CHANGES[name]
    eager = weights(train("eager", optimizer, change))
    with caplog.at_level(logging.INFO, "libai.engine"):
        graph = weights(train("graph", optimizer, change))
    # the same operations on the same values: bitwise equal, or within 1e-6 if kernels differ
    assert_allclose(graph, eager, rtol=1e-6, atol=1e-7)
    assert caplog.text.count("compiling the graph again") == most_compilations


def test_a_gradient_of_a_hook_is_refused_by_a_compiled_step():
    with refused(r"head.bias has a gradient before iteration 6.*optimizer.zero_grad\(\)"):
        train("graph", "sgd", once(lambda trainer: trainer.model.head.bias.sum().backward()))


def test_a_parameter_with_gradients_from_before_cannot_join_a_compiled_step():
    with refused("iteration 6: head.* was added to the optimizer.*Freeze it until"):
        train(
            "graph",
            "body",
            once(lambda trainer: trainer.optimizer.add_param_group(groups(trainer.model)[1])),
        )


def taken_and_given_back(trainer, i):
    """Take a group away and freeze its parameters, and give it back later."""
    if i in (4, 8):
        trainer.model.head.requires_grad_(i == 8)
    if i == 4:
        trainer.optimizer.param_groups.pop()
    elif i == 8:
        trainer.optimizer.add_param_group(groups(trainer.model)[1])


@pytest.mark.e2e
def test_a_parameter_that_was_frozen_meanwhile_joins_a_compiled_step():
    eager, graph = (
        weights(train(mode, "sgd", taken_and_given_back)) for mode in ("eager", "graph")
    )
    assert_allclose(graph, eager, rtol=1e-6, atol=1e-7)  # as above


def test_another_optimizer_is_refused(mode):
    with refused("iteration 6: trainer.optimizer .* another object.*param_groups"):
        train(
            mode,
            "sgd",
            once(lambda trainer: setattr(trainer, "optimizer", OPTIMIZERS["sgd"](trainer.model))),
        )


def test_a_change_that_is_ignored_would_be_noticed(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(guards.Guards, "decide", lambda self, iteration: "compiled")
    change, _ = CHANGES["loss weight once"]
    assert (
        np.abs(
            weights(train("graph", "sgd", change)) - weights(train("eager", "sgd", change))
        ).max()
        > 1e-3
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    "change, build, settings",
    [
        (CHANGES["loss switched"][0], Model, {"num_accumulation_steps": 2}),
        (CHANGES["the rate"][0], transposed_body, {}),
        (
            lambda trainer, i: trainer.model.head.requires_grad_(i >= 4),
            frozen_head,
            {"max_grad_norm": 0.05},
        ),
    ],
)
def test_a_change_has_the_same_effect_with_accumulation_and_clipping(change, build, settings):
    both = [weights(train(mode, "sgd", change, build, **settings)) for mode in TRAINERS]
    assert_allclose(*both, rtol=1e-5, atol=1e-7)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name, line",
    [
        (
            "weight decay once",
            r'compiling the graph again before iteration 6: param_groups\[0\]\["weight_decay"\]',
        ),
        (
            "loss weight annealed",
            "repeated changes of scale:.* updates run eagerly.*register_buffer",
        ),
    ],
)
def test_one_line_names_the_change(name, line, monkeypatch, caplog):
    monkeypatch.setattr("libai.utils.logging._warned", set())
    with caplog.at_level(logging.INFO, "libai.engine"):
        train("graph", "sgd", CHANGES[name][0])
    assert len(re.findall(line, caplog.text)) == 1


@pytest.mark.e2e
def test_a_value_that_is_constant_again_is_compiled(monkeypatch, caplog):
    monkeypatch.setattr(guards, "STEADY_ITERS", 4)
    with caplog.at_level(logging.INFO, "libai.engine"):
        train("graph", "sgd", set_on("", "scale", lambda i: float(min(i, 6))))
    # compiled at the first change, and again once the value has been constant for four iterations
    assert caplog.text.count("compiling the graph again") == 2


def test_a_step_without_changes_compares_nothing(monkeypatch):
    """A step without changes reads a counter and compares stored values; it does not inspect the
    model again.
    """
    compared = []

    def watch(trainer, iteration):
        if iteration == 3:
            monkeypatch.setattr(guards.Guards, "_look", lambda self: compared.append(1))

    train("graph", "sgd", watch)
    assert compared == []


def test_evaluation_follows_a_change(mode):
    trainer = train(mode, "sgd", lambda trainer, i: None)
    batch = {"x": np.ones((4, 3), "float32"), "y": np.zeros((4, 1), "float32")}
    before = trainer.predict(batch)["prediction"].numpy()
    for shift in (1.0, 2.0, 3.0):
        trainer.model.dropout.shift = shift
        now = trainer.predict(batch)["prediction"].numpy()
        assert_allclose(now, before + shift, rtol=1e-6, atol=1e-6)


class Clamping(flow.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group.parameters:
                parameter.data.clamp_(-0.2, 0.2)


class Accumulating(flow.optim.SGD):
    def zero_grad(self, set_to_none=False):
        pass


class Plain(flow.optim.SGD):
    """A subclass that replaces neither `step` nor `zero_grad`."""


def patched(parameters, lr):
    optimizer = Plain(parameters, lr)
    optimizer.step = lambda: None
    return optimizer


@pytest.mark.parametrize(
    "build, name",
    [
        (Clamping, "Clamping.step"),
        (Accumulating, "Accumulating.zero_grad"),
        (patched, "Plain.step"),
    ],
)
def test_an_optimizer_with_a_custom_update_is_refused(build, name):
    model = Model()
    with refused(rf"{name} is not OneFlow's own.*after_step.*graph.enabled=false"):
        GraphTrainer(model, batches(), build(model.parameters(), lr=0.1))


def test_a_subclass_without_a_custom_update_is_compiled():
    model = Model()
    trainer = GraphTrainer(model, batches(), Plain(model.parameters(), lr=0.1))
    trainer.train(0, 2)
    assert trainer.graph is not None
