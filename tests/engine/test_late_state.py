"""A Python value that forward changes, and that takes effect only after the rehearsed updates, is
refused in graph mode: a compiled step does not change it.
"""

import functools
import itertools
import types
from random import random as from_python

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.utils.errors import UserError

#: the number of calls after which a value takes effect
LATE = 6
calls = 0
table = {"calls": 0}
array = np.zeros(1)
steps = itertools.count()
factors = itertools.cycle([1.0] * LATE + [2.0])
random = np.random.default_rng(0)
log = []
cache = {}

pytestmark = pytest.mark.e2e


def weight(number):
    return 2.0 if number > LATE else 1.0


def with_default(h, seen=[]):  # noqa: B006
    seen.append(1)
    return h * weight(len(seen))


def with_keyword(h, *, seen={"calls": 0}):  # noqa: B006
    seen["calls"] += 1
    return h * weight(seen["calls"])


def with_attribute(h):
    with_attribute.calls = getattr(with_attribute, "calls", 0) + 1
    return h * weight(with_attribute.calls)


def with_global(h):
    global calls
    calls += 1
    return h * weight(calls)


class Tracker:
    calls = 0

    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1
        return self.count

    def __call__(self, h):
        return h * weight(self.step())


class Meta(type):
    calls = 0


class Made(metaclass=Meta):
    """Its metaclass counts."""


tracker = Tracker()


def in_class(net, h):
    Tracker.calls += 1
    return h * weight(Tracker.calls)


def in_own_class(net, h):
    type(net).calls = (type(net).calls + 1) % 20
    return h * weight(net.calls)


def in_class_of_self(net, h):
    net.__class__.calls += 1
    return h * weight(Net.calls)


def in_metaclass(net, h):
    Meta.calls += 1
    return h * weight(Made.calls)


def in_table(net, h):
    table["calls"] += 1
    return h * weight(table["calls"])


def in_array(net, h):
    array[0] += 1
    return h * weight(array[0])


def by_name(net, h):
    setattr(net, "count", getattr(net, "count") + 1)  # noqa: B009, B010
    return h * weight(getattr(net, "count"))  # noqa: B009


def by_dict(net, h):
    vars(net)["count"] = vars(net)["count"] + 1
    return h * weight(net.__dict__["count"])


def in_attribute(net, h):
    net.held.count += 1
    return h * weight(net.held.count)


def in_closure():
    seen = []

    def use(net, h):
        seen.append(1)
        return h * weight(len(seen))

    return use


def in_variable():
    count = 0

    def use(net, h):
        nonlocal count
        count += 1
        return h * weight(count)

    return use


LATE_VALUES = {
    "default": lambda net, h: with_default(h),
    "keyword": lambda net, h: with_keyword(h),
    "function": lambda net, h: with_attribute(h),
    "global": lambda net, h: with_global(h),
    "object": lambda net, h: h * weight(tracker.step()),
    "called object": lambda net, h: net.tracker(h),
    "class": in_class,
    "own class": in_own_class,
    "class of self": in_class_of_self,
    "metaclass": in_metaclass,
    "table": in_table,
    "array": in_array,
    "by name": by_name,
    "by dict": by_dict,
    "attribute": in_attribute,
    "closure": in_closure(),
    "variable": in_variable(),
    "count": lambda net, h: h * weight(next(steps)),
    "cycle": lambda net, h: h * next(factors),
    "generator": lambda net, h: h * (2.0 if random.random() > 0.999 else 1.0),
    "generator of NumPy": lambda net, h: h * (2.0 if np.random.random() > 0.999 else 1.0),
    "generator of Python": lambda net, h: h * (2.0 if from_python() > 0.999 else 1.0),
    "partial": lambda net, h: net.partial(h),
    "method": lambda net, h: h * weight(net.method()),
}


def filled(net, h):
    if "mask" not in cache:
        cache["mask"] = flow.ones(4)
    return h * cache["mask"]


@functools.cache
def factor_of(width):
    return width * 0.5


def counted(net, h):
    log.append(1)
    net.held.count += 1
    Tracker.unread = getattr(Tracker, "unread", 0) + 1
    return h


def kept(net, h):
    net.last = h.detach()
    return h


#: what forward may do outside of buffers
HARMLESS = {
    "cache": filled,
    "cached": lambda net, h: h * factor_of(h.shape[1]),
    "counted": counted,
    "kept": kept,
}


class Net(nn.Module):
    calls = 0

    def __init__(self, use):
        super().__init__()
        self.fc, self.use, self.count = nn.Linear(4, 4), use, 0
        self.tracker, self.held = Tracker(), types.SimpleNamespace(count=0)
        self.partial, self.method = functools.partial(with_default, seen=[]), Tracker().step

    def forward(self, x, y):
        return ((self.use(self, self.fc(x)) - y) ** 2).mean()


def train(mode, use):
    net = toy.seeded(Net(use))
    optimizer = flow.optim.SGD(net.parameters(), lr=0.02)
    return toy.trained_losses(mode, net, optimizer, toy.pair, LATE + 4, rehearse=None)


@pytest.mark.parametrize("name", LATE_VALUES)
def test_a_value_that_takes_effect_late_is_refused(name):
    with pytest.raises(UserError, match=r"forward changes .*, even after two updates"):
        train("graph", LATE_VALUES[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_values_that_no_later_call_reads_are_accepted(name):
    losses, trainer = train("graph", HARMLESS[name])
    assert trainer.graph is not None
    np.testing.assert_allclose(losses, train("eager", HARMLESS[name])[0], rtol=1e-5)
