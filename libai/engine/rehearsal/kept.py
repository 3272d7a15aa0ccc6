"""Everything that updates of a trainer change, put back at the end of a block.

Not here: the position of the data (`DataFeed.read_ahead`). Not put back: what closures of gradient hooks hold, and
iterators that a model reads (`iterators_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.rehearsal.snapshot import rolled_back
from libai.forward.python_state import (
    SharedState,
    cannot_go_back,
    contents_of,
    copy_of_iterator,
    plain_attributes,
)
from libai.utils.seeding import generators_kept


@contextmanager
def everything_kept(trainer: Any) -> Iterator[list[Callable[[], None]]]:
    """Put back, bit for bit, what the updates made in the block change; hooks do not see these updates.

    Weights, buffers, optimizer, schedule, plain attributes and shared variables of the model's code, and the generators
    of Python and NumPy. OneFlow's generator goes back to where it was seeded. Gives a list of functions that put back
    more, to which the block may add. Collective.
    """
    iteration = trainer.iter
    calls = trainer.loop.calls_at
    trainer.loop.calls_at = {point: [] for point in calls}
    draws = flow.get_rng_state()
    put_back = [SharedState.of_model(trainer.model).restore, _keep_attributes(trainer.model)]
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


def iterators_of(model: nn.Module) -> list[str]:
    """Return the names of what the model's code reads iterators from that nothing can put back."""
    found = []
    for path, module in model.named_modules():
        for name, value in plain_attributes(module).items():
            if cannot_go_back(value):
                found.append(f"{path}.{name}" if path else name)
    return found + SharedState.of_model(model).lasting_iterators()


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


@contextmanager
def stock_dropout_off(model: nn.Module) -> Iterator[None]:
    """Let OneFlow's own dropout layers drop nothing in the block: their masks ignore seeds and cannot be repeated."""
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
