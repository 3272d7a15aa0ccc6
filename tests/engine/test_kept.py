"""What updates change in Python values is compared and put back to the same depth."""

import enum
import itertools
import logging
import threading

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from oneflow.optim.lr_scheduler import LambdaLR

from libai.engine.rehearsal.kept import forward_rolled_back
from libai.forward.inventory import Inventory
from libai.forward.python_state import MAX_DEPTH
from libai.utils import logging as logs


class Box:
    def __init__(self, content):
        self.content = content


class Callable(Box):
    def __call__(self):
        return self.content

    def method(self):
        return self.content


#: a container of one value → that value
OPENED = {
    "list": (lambda value: [value], lambda box: box[0]),
    "dict": (lambda value: {"key": value}, lambda box: box["key"]),
    "tuple": (lambda value: (value,), lambda box: box[0]),
    "object": (Box, lambda box: box.content),
    "callable": (Callable, lambda box: box.content),
    "method": (lambda value: Callable(value).method, lambda box: box.__self__.content),
}
#: levels that one of them adds: a method holds an object that holds the value
LEVELS = {kind: 2 if kind == "method" else 1 for kind in OPENED}


def change(value):
    """Change a list, an array or a tensor in place."""
    if isinstance(value, list):
        value.append(1)
    else:
        value += 1


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logs, "_warned", set(), raising=False)
    logger = logging.getLogger("libai")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    "kind, innermost",
    [
        *((kind, list) for kind in OPENED),
        ("list", lambda: np.zeros(2)),
        ("list", lambda: flow.zeros(2)),
    ],
)
@pytest.mark.parametrize("num_boxes", range(MAX_DEPTH + 3))
def test_a_value_is_put_back_exactly_if_it_is_compared(kind, num_boxes, innermost, warnings):
    box, opened = OPENED[kind]
    model = nn.Linear(1, 1)
    value = innermost()
    model.held = value
    for _ in range(num_boxes):
        model.held = box(model.held)
    kept = Inventory(model.modules())
    change(value)
    is_compared = bool(kept.changed())
    kept.restore()
    inner = model.held
    for _ in range(num_boxes):
        inner = opened(inner)
    is_put_back = inner.sum().item() == 0 if hasattr(inner, "sum") else inner == []
    is_within = num_boxes * LEVELS[kind] <= MAX_DEPTH
    assert (is_compared, is_put_back) == (is_within, is_within)
    said = [text for text in warnings() if "Linear.held holds values inside more than" in text]
    assert bool(said) != is_within


def test_a_value_that_is_also_near_is_put_back():
    """The first path to it ends beyond the limit."""
    model = nn.Linear(1, 1)
    near = Box([])
    model.a = near
    for _ in range(MAX_DEPTH):
        model.a = [model.a]
    model.b = near
    kept = Inventory(model.modules())
    near.content.append(1)
    kept.restore()
    assert near.content == []


@pytest.mark.parametrize("hold", [lambda one: one, lambda one: [one], lambda one: {"key": [one]}])
def test_an_iterator_in_a_container_is_put_back(hold):
    model = nn.Linear(1, 1)
    numbers = itertools.count()
    model.held = hold(numbers)
    kept = Inventory(model.modules())
    next(numbers)
    for _ in range(2):
        kept.restore()
        inner = model.held
        while not isinstance(inner, itertools.count):
            inner = inner["key"] if isinstance(inner, dict) else inner[0]
        assert next(inner) == 0
    assert kept.iterators == []


@pytest.mark.parametrize(
    "hold", [lambda one: one, lambda one: [one], Box, lambda one: (one,), lambda one: {"key": one}]
)
def test_an_iterator_that_cannot_be_put_back_is_named(hold):
    model = nn.Linear(1, 1)
    model.held = hold(number for number in range(3))
    assert Inventory(model.modules()).iterators == ["Linear.held"]


def test_a_file_that_is_only_written_is_not_an_iterator(tmp_path):
    model = nn.Linear(1, 1)
    with open(tmp_path / "written", "w") as model.held:
        assert Inventory(model.modules()).iterators == []
    with open(tmp_path / "written") as model.held:
        assert Inventory(model.modules()).iterators == ["Linear.held"]


def halving(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def halving_with_a_lock(optimizer):
    """Return a schedule that cannot be copied."""
    schedule = halving(optimizer)
    schedule.lock = threading.Lock()
    return schedule


class Own:
    """A schedule without `state_dict` that cannot be copied."""

    def __init__(self, optimizer):
        self.optimizer, self.made, self.lock = optimizer, {"steps": 0}, threading.Lock()

    def step(self):
        self.made["steps"] += 1
        self.optimizer.param_groups[0]["lr"] *= 0.5


class Choice(enum.Enum):
    TANH = 1
    RELU = 2


class Whole(enum.IntFlag):
    ONE = 1
    TWO = 2


class Fixed(type):
    """A metaclass that forbids assignments."""

    def __setattr__(cls, name, value):
        raise AttributeError(f"{cls.__name__}.{name} is fixed")


class Settings(metaclass=Fixed):
    factor = 2.0


class Tally:
    """Code adds attributes to this class."""


def helper(h):
    helper.calls = getattr(helper, "calls", 0) + 1
    return h


class Leaving(nn.Module):
    """Its forward adds names to classes, functions and globals, and reads constants of classes that
    refuse assignments.
    """

    def __init__(self):
        super().__init__()
        self.fc, self.choice = nn.Linear(4, 4), Choice.TANH

    def forward(self, x):
        global added_name
        added_name = 1
        Leaving.added = getattr(Leaving, "added", 0) + 1
        Tally.added = getattr(Tally, "added", 0) + 1
        h = helper(self.fc(x)) * Settings.factor * Whole.TWO.value
        return (flow.tanh(h) if self.choice is Choice.TANH else flow.relu(h)).mean()


def test_names_that_forward_adds_are_deleted_and_constants_are_not_assigned():
    model = Leaving()
    owners = [vars(Leaving), vars(Tally), vars(helper), globals()]
    before = [set(owner) for owner in owners]
    with forward_rolled_back(model):
        model(flow.ones(2, 4))
        assert Leaving.added == Tally.added == helper.calls == added_name
    assert [set(owner) for owner in owners] == before
