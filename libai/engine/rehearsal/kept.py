"""Everything that updates of a trainer change, put back at the end of a block.

Not here: the position of the data (`DataFeed.read_ahead`). Not put back: what closures of gradient hooks hold, and
iterators without a copy (`iterators_of`).
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.snapshot import Snapshot
from libai.forward.python_state import (
    PACKAGES,
    SharedState,
    cannot_go_back,
    contents_of,
    copy_of_iterator,
    lasting_iterators,
    plain_attributes,
)
from libai.utils.distributed import barrier
from libai.utils.seeding import generators_kept

logger = logging.getLogger("libai.engine")
#: attributes of an optimizer that `Snapshot` holds
_IN_SNAPSHOT = ("param_groups", "_state")


@contextmanager
def rolled_back(trainer: Any) -> Iterator[None]:
    """Put the state of `trainer`, its iteration, and the generators of Python and NumPy, back at the end of the block;
    also what the code of its model, optimizer and schedule keeps in Python.

    Within it the schedule is a copy, which may be replaced. Collective.
    """
    iteration = trainer.iter
    schedule = trainer.lr_scheduler
    python = [SharedState.of_model(trainer.model).restore, _keep_attributes(trainer.model)]
    for owner in _owners(trainer):
        python += [_keep_object(owner), SharedState.of_functions(_functions_of(owner)).restore]
    # schedules write momentum and weight decay, too
    settings = [(group._options, dict(group._options)) for group in trainer.optimizer.param_groups]
    trainer.lr_scheduler = None  # it is copied below, also one that has no state to save
    before = Snapshot.of(trainer)
    try:
        trainer.lr_scheduler = copy.deepcopy(schedule, {id(trainer.optimizer): trainer.optimizer})
    except Exception:  # whatever deepcopy raises for a schedule of the user's: rates stay as they are in the block
        logger.debug("the schedule cannot be copied, so it does not advance", exc_info=True)
    with generators_kept():
        try:
            yield
        finally:
            barrier()
            for restore in python:
                restore()
            trainer.lr_scheduler = None
            before.restore(trainer)
            for options, copied in settings:
                options.clear()  # not by the setters of the group, which the guards of a graph count
                options.update(copied)
            trainer.lr_scheduler = schedule
            trainer.iter = iteration


@contextmanager
def everything_kept(trainer: Any) -> Iterator[list[Callable[[], None]]]:
    """Put back, bit for bit, what the updates made in the block change; hooks do not see these updates.

    What `rolled_back` puts back, and OneFlow's generator, which goes back to where it was seeded. Gives a list of
    functions that put back more, to which the block may add. Collective.
    """
    iteration = trainer.iter
    calls = trainer.loop.calls_at
    trainer.loop.calls_at = {point: [] for point in calls}
    draws = flow.get_rng_state()
    put_back: list[Callable[[], None]] = []
    try:
        with rolled_back(trainer):
            try:
                yield put_back
            finally:
                for restore in put_back:
                    restore()
    finally:
        trainer.clear_gradients()
        trainer.iter = iteration
        trainer.loop.calls_at = calls
        if has_drawn_since(draws):
            flow.set_rng_state(draws)


@contextmanager
def python_kept(model: nn.Module) -> Iterator[None]:
    """Put back what forwards of `model` in the block change in Python: attributes, shared variables, and the generators
    of Python and NumPy; for a trace, which runs the Python code of forward and changes no tensor."""
    put_back = [SharedState.of_model(model).restore, _keep_attributes(model)]
    with generators_kept():
        try:
            yield
        finally:
            for restore in put_back:
                restore()


@contextmanager
def forward_rolled_back(model: nn.Module) -> Iterator[None]:
    """`python_kept`, and the values of buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with python_kept(model):
            yield
    finally:
        with flow.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def has_drawn_since(state: flow.Tensor) -> bool:
    """Return whether anybody has drawn from OneFlow's generator since its `state` was read."""
    return flow.get_rng_state().numpy().tobytes() != state.numpy().tobytes()


def iterators_of(trainer: Any) -> list[str]:
    """Return the names of what the code of model, optimizer and schedule reads iterators from that nothing can put
    back."""
    found = []
    functions = []
    for owner in _owners(trainer):
        found += [f"{type(owner).__name__}.{name}" for name, value in vars(owner).items() if cannot_go_back(value)]
        functions += _functions_of(owner)
    for path, module in trainer.model.named_modules():
        for name, value in plain_attributes(module).items():
            if cannot_go_back(value):
                found.append(f"{path}.{name}" if path else name)
    return found + lasting_iterators(trainer.model, functions)


def _keep_attributes(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives every module of `model` the attributes and buffers that it has now."""
    kept = []
    for module in model.modules():
        attributes = {name: copy_of_iterator(value) for name, value in plain_attributes(module).items()}
        contents = [contents_of(value) for value in attributes.values()]
        kept.append((module, attributes, contents, dict(module._buffers)))

    def put_back() -> None:
        for module, attributes, contents, buffers in kept:
            for restore in contents:
                restore()
            for name in plain_attributes(module):
                if name not in attributes:
                    del vars(module)[name]
            for name, value in attributes.items():
                vars(module)[name] = copy_of_iterator(value)  # not by `setattr`, which the guards of a graph count
            module._buffers.clear()
            module._buffers.update(buffers)

    return put_back


def _owners(trainer: Any) -> list[Any]:
    """The optimizers and the schedule, which may be of a class of the user's."""
    optimizer = trainer.optimizer
    owners = [optimizer, *getattr(optimizer, "optimizers", {}).values(), trainer.lr_scheduler]
    return [owner for owner in owners if hasattr(owner, "__dict__")]


def _keep_object(owner: Any) -> Callable[[], None]:
    """Return a function that gives `owner` the attributes that it has now, but for those in a `Snapshot`."""
    attributes = {}
    for name, value in vars(owner).items():
        if name not in _IN_SNAPSHOT:
            attributes[name] = copy_of_iterator(value)
    contents = [contents_of(value) for value in attributes.values()]

    def put_back() -> None:
        for restore in contents:
            restore()
        for name in list(vars(owner)):
            if name not in attributes and name not in _IN_SNAPSHOT:
                del vars(owner)[name]
        for name, value in attributes.items():
            vars(owner)[name] = copy_of_iterator(value)

    return put_back


def _functions_of(owner: Any) -> list[types.FunctionType]:
    """The functions of the user that `owner` may call: methods of its class, and those in its attributes."""
    values = list(vars(owner).values())
    for cls in type(owner).__mro__:
        if cls.__module__.split(".")[0] not in PACKAGES:
            values += vars(cls).values()
    found = []
    seen = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            values += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            values.append(value.__func__)
        elif isinstance(value, types.FunctionType):
            found.append(value)
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            values += [one for one in value if callable(one)]
    return found


@contextmanager
def stock_dropout_off(model: nn.Module) -> Iterator[None]:
    """Disable OneFlow's own dropout layers in the block: their masks ignore seeds and cannot be repeated."""
    before = []
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            before.append((module, module.p))
            vars(module)["p"] = 0.0
    try:
        yield
    finally:
        for module, p in before:
            vars(module)["p"] = p
