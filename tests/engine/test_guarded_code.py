"""A hook exchanges code or an equal object: the compiled run trains like a plain loop."""

import contextvars
import dataclasses
import functools
import os
import threading
import types

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.engine.compiled.step import CompiledStep
from libai.utils.errors import UserError

# dozens of short trainings; tests/engine/test_guards.py is in the first command
pytestmark = pytest.mark.e2e

UPDATES = 9
#: the update after which the hook acts
CHANGED = 3


def act(h):
    return flow.tanh(h)


def nested(h):
    return act(h)


def other(h):
    return flow.sigmoid(h) * 2


def with_default(h, function=act, *, factor=1.0):
    return function(h) * factor


class Shape:
    @staticmethod
    def static(h):
        return flow.tanh(h)

    @classmethod
    def of_class(cls, h):
        return flow.tanh(h)

    def method(self, h):
        return flow.tanh(h)


class OtherShape(Shape):
    @staticmethod
    def static(h):
        return other(h)


class Kind(nn.Module):
    def forward(self, h):
        return flow.tanh(h)


class OtherKind(Kind):
    def forward(self, h):
        return other(h)


class Value:
    """Objects with equal contents are equal."""

    def __init__(self):
        self.number = 1

    def __eq__(self, another):
        return vars(self) == vars(another)

    def __hash__(self):
        return 1


@dataclasses.dataclass(slots=True)
class Slotted:
    number: float = 1.0
    table: dict = dataclasses.field(default_factory=lambda: {"a": 1.0})


class Plain:
    """Every object differs from all others."""


class Net(nn.Module):
    gain = 1.0

    def __init__(self, name):
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.register_buffer("shift", flow.full((4,), 2.0))
        self.fc, self.kind, self.name, self.scale = nn.Linear(4, 4), Kind(), name, 1.0
        self.first = MAKE[name]() if name in MAKE else None
        self.now = self.first
        self.holder = types.SimpleNamespace(now=self.first)
        self.table = {Plain: 1.0}
        self.zero = 0.0
        self.flags = [True]
        function = act
        self.closure = lambda h: function(h)

    def run(self, h):
        return flow.tanh(h)

    def forward(self, x, y):
        h, name = self.fc(x) * self.scale, self.name
        if name in MAKE:
            h = flow.tanh(h) if self.is_first() else other(h)
        else:
            h = USES[name](self, h)
        return ((h - y) ** 2).mean()

    def is_first(self):
        if self.name == "plain":
            return self.now == self.first
        return self.now is self.first and self.holder.now is self.first


MAKE = {
    "object": Value,
    "plain": Plain,
    "list": lambda: [1, 2],
    "dict": lambda: {"a": 1},
    "tuple": lambda: (*[1, 2],),
    "text": lambda: "".join(["a", "b c"]),
    "number": lambda: int("12345"),
    "array": lambda: np.ones(3, "float32"),
    "tensor": lambda: flow.ones(3),
}
USES = {
    "global": lambda net, h: act(h),
    "nested": lambda net, h: nested(h),
    "builtin": lambda net, h: flow.tanh(h) * reduce([1.0, 2.0]),
    "class": lambda net, h: Shape.static(h),
    "closure": lambda net, h: net.closure(h),
    "default": lambda net, h: with_default(h),
    "keyword": lambda net, h: with_default(h),
    "code": lambda net, h: with_default(h),
    "static": lambda net, h: Shape.static(h),
    "classmethod": lambda net, h: Shape.of_class(h),
    "method": lambda net, h: Shape().method(h),
    "own method": lambda net, h: net.run(h),
    "module class": lambda net, h: net.kind(h),
    "shadowed": lambda net, h: net.kind(h),
    "shadowed forward": lambda net, h: net.kind(h),
    "written past": lambda net, h: flow.tanh(h),
    "of the class": lambda net, h: flow.tanh(h) * net.__class__.gain,
    "by globals": lambda net, h: flow.tanh(h) * globals()["weight"],
    "module of a dict": lambda net, h: net.parts["b"](net.parts["a"](h)),
    "module taken": lambda net, h: net.parts["a"](h) if "b" in net.parts else h,
    "bias taken": lambda net, h: h * len([*net.fc.parameters()]),
    "buffer taken": lambda net, h: h if net.shift is None else h + net.shift,
    "object past": lambda net, h: flow.tanh(h),
    "slots": lambda net, h: flow.tanh(h) * SLOTS.number * SLOTS.table["a"],
    "environment": lambda net, h: flow.tanh(h) * float(os.environ.get("LIBAI_TEST_GAIN", 1)),
    "context": lambda net, h: flow.tanh(h) * CONTEXT.get(),
    "thread": lambda net, h: flow.tanh(h) * THREAD.gain,
    "sign of zero": lambda net, h: flow.tanh(h) * float(np.copysign(1.0, net.zero)),
    "equal item": lambda net, h: h if net.flags[0] is True else flow.tanh(h),
    "in vars": lambda net, h: flow.tanh(h) * (2 if "added" in vars(net) else 1),
    "in dir": lambda net, h: flow.tanh(h) * (2 if "added" in dir(net) else 1),
    "missing global": lambda net, h: flow.tanh(h) * globals().get("gain_that_is_added", 1.0),
    "rate": lambda net, h: flow.tanh(h) * sum(one["lr"] for one in net.holder.param_groups),
}
reduce = max
weight = 1.0
SLOTS = Slotted()
CONTEXT = contextvars.ContextVar("gain", default=1.0)
THREAD = threading.local()
THREAD.gain = 1.0


def set_global(name, value):
    return lambda net, patch: patch.setitem(globals(), name, value)


def set_on(owner, name, value):
    return lambda net, patch: patch.setattr(owner, name, value)


def set_in_closure(net, patch):
    net.closure.__closure__[0].cell_contents = other


CHANGES = {
    "global": set_global("act", other),
    "nested": set_global("act", other),
    "builtin": set_global("reduce", min),
    "class": set_global("Shape", OtherShape),
    "closure": set_in_closure,
    "default": set_on(with_default, "__defaults__", (other,)),
    "keyword": set_on(with_default, "__kwdefaults__", {"factor": 2.0}),
    "code": set_on(with_default, "__code__", (lambda h, function=0, *, factor=0: h * 3).__code__),
    "static": set_on(Shape, "static", staticmethod(other)),
    "classmethod": set_on(Shape, "of_class", classmethod(lambda cls, h: other(h))),
    "method": set_on(Shape, "method", lambda self, h: other(h)),
    "own method": set_on(Net, "run", lambda self, h: other(h)),
    "module class": lambda net, patch: setattr(net.kind, "__class__", OtherKind),
    "shadowed": lambda net, patch: vars(net).update(kind=other),
    "shadowed forward": lambda net, patch: vars(net.kind).update(forward=other),
    "of the class": set_on(Net, "gain", 2.0),
    "by globals": set_global("weight", 2.0),
    "module of a dict": lambda net, patch: net.parts.update(dict(zip("ba", net.parts.values()))),
    "buffer taken": lambda net, patch: setattr(net, "shift", None),
    "written past": lambda net, patch: vars(net).update(scale=2.0),
    "object past": lambda net, patch: object.__setattr__(net, "scale", 2.0),
    "slots": lambda net, patch: patch.setitem(SLOTS.table, "a", 2.0),
    "environment": lambda net, patch: patch.setenv("LIBAI_TEST_GAIN", "2"),
    "context": lambda net, patch: CONTEXT.set(2.0),
    "thread": set_on(THREAD, "gain", 2.0),
    "sign of zero": lambda net, patch: setattr(net, "zero", -0.0),
    "equal item": lambda net, patch: net.flags.__setitem__(0, 1),
    "in vars": lambda net, patch: setattr(net, "added", 1),
    "in dir": lambda net, patch: setattr(net, "added", 1),
    "missing global": lambda net, patch: patch.setitem(globals(), "gain_that_is_added", 2.0),
    "rate": lambda net, patch: net.holder.param_groups[0].__setitem__("lr", 0.2),
}


def change_to_equal(net, patch):
    net.now = MAKE[net.name]()


def change_inside(net, patch):
    net.holder.now = MAKE[net.name]()


CASES = [
    *CHANGES.items(),
    *((name, change_to_equal) for name in MAKE),
    *((name, change_inside) for name in ("object", "list", "tensor")),
]


def build(name):
    net = toy.seeded(Net(name))
    optimizer = flow.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    CONTEXT.set(1.0)
    if name == "rate":
        net.holder = optimizer
    return net, optimizer


def plain(name, change):
    net, optimizer = build(name)
    with pytest.MonkeyPatch.context() as patch:
        return toy.plain_losses(
            net, optimizer, toy.pair, UPDATES, lambda i: i == CHANGED and change(net, patch)
        )


def compiled(name, change):
    """Return the losses of a compiled run, and its trainer."""
    net, optimizer = build(name)
    with pytest.MonkeyPatch.context() as patch:
        return toy.trained_losses(
            "graph",
            net,
            optimizer,
            toy.pair,
            UPDATES,
            lambda trainer: trainer.iter == CHANGED and change(net, patch),
        )


@pytest.mark.parametrize(
    ("name", "change"), CASES, ids=[f"{name}-{getattr(one, '__name__', '')}" for name, one in CASES]
)
def test_code_and_objects_that_a_hook_exchanges_take_effect(name, change):
    expected = plain(name, change)
    unchanged = plain(name, lambda net, patch: None)
    assert max(abs(np.array(expected) / unchanged - 1)) > 1e-3  # the change matters
    np.testing.assert_allclose(compiled(name, change)[0], expected, rtol=1e-5)


TAKEN = {
    "module taken": lambda net: net.parts.pop("b"),
    "bias taken": lambda net: setattr(net.fc, "bias", None),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_parameter_that_is_taken_from_the_model_alone_is_refused(name):
    with pytest.raises(UserError, match="is not one of the model's"):
        compiled(name, lambda net, patch: TAKEN[name](net))


def test_equal_values_that_no_code_tells_apart_are_not_compiled_again(monkeypatch):
    """A hook that assigns an equal list in every iteration does not make updates eager."""
    compiled = []
    compile_it = CompiledStep.compile
    monkeypatch.setattr(
        CompiledStep, "compile", lambda self, *args: compiled.append(1) or compile_it(self, *args)
    )

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.powers = nn.Linear(4, 4), [1.0, 2.0]

        def forward(self, x, y):
            return ((self.fc(x) * sum(self.powers) - y) ** 2).mean()

    net = Sums()
    assign = functools.partial(setattr, net, "powers")
    _, trainer = toy.trained_losses(
        "graph",
        net,
        flow.optim.SGD(net.parameters(), lr=0.1),
        toy.pair,
        UPDATES,
        lambda trainer: assign([1.0, 2.0]),
    )
    assert len(compiled) == 1
    assert not trainer.step.runs_eagerly
