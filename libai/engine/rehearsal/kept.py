"""Save everything that updates of a trainer change, and put it back at the end of a block.

The position of the data is saved elsewhere (`DataFeed.read_ahead`). Iterators that cannot be
copied are not put back (`Inventory.iterators`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.snapshot import Snapshot
from libai.engine.trainer import ModelTrainer
from libai.forward.inventory import Inventory
from libai.layers.random import STOCK_DROPOUTS
from libai.utils.distributed import barrier
from libai.utils.seeding import generators_kept


def inventory_of(trainer: ModelTrainer, functions: Sequence[Any] = ()) -> Inventory:
    """Keep what a trainer's modules, optimizers and schedule hold, and what their code, their hooks
    and `functions` can reach.
    """
    optimizers = [trainer.optimizer, *getattr(trainer.optimizer, "optimizers", {}).values()]
    owners = [one for one in (*optimizers, trainer.lr_scheduler) if hasattr(one, "__dict__")]
    kept = Inventory([*trainer.model.modules(), *owners])
    for function in functions:
        kept.add_function(function)
    return kept


@contextmanager
def rolled_back(
    trainer: ModelTrainer,
    weights: Mapping[str, np.ndarray] | None = None,
) -> Iterator[Inventory]:
    """Put the state of `trainer` back at the end of the block.

    This includes its iteration, the generators of Python and NumPy, and the Python values that the
    code of its model, optimizer and schedule keeps. Inside the block `trainer.lr_scheduler` may be
    replaced. `weights`: as for `Snapshot`. Collective.
    """
    iteration = trainer.iter
    schedule = trainer.lr_scheduler
    parameters = [(one, one.requires_grad, one.grad) for one in trainer.model.parameters()]
    python = inventory_of(trainer)
    trainer.lr_scheduler = None  # it may have no state to save
    before = Snapshot(trainer, weights)
    trainer.lr_scheduler = _copy_of_schedule(schedule, trainer.optimizer)
    with generators_kept():
        try:
            yield python
        finally:
            if not isinstance(
                sys.exc_info()[1], KeyboardInterrupt | SystemExit
            ):  # a rank may leave by itself
                barrier()
            python.restore()
            for parameter, requires_grad, gradient in parameters:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
            trainer.lr_scheduler = None
            before.restore(trainer)
            trainer.lr_scheduler = schedule
            trainer.iter = iteration


def _copy_of_schedule(schedule: Any, optimizer: flow.optim.Optimizer) -> Any:
    """Return a copy of `schedule` that sets the rates of the same optimizer, or `schedule` itself
    if it cannot be copied, for example because it holds a lock.

    `Inventory` puts back what the schedule itself holds. A copy also protects values that Python
    code cannot put back, such as slots.
    """
    try:
        return copy.deepcopy(schedule, {id(optimizer): optimizer})
    except Exception:  # deepcopy of a user's schedule may raise anything
        return schedule


@contextmanager
def updates_undone(
    trainer: ModelTrainer,
    functions: Sequence[Any] = (),
    seed: int | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
) -> Iterator[Inventory]:
    """Undo the updates made in the block, bit for bit. Hooks do not see these updates.

    Puts back what `rolled_back` puts back and what `functions` can reach, and sets OneFlow's
    generator back to where it was seeded. `seed` seeds that generator for the block. OneFlow's own
    dropout is off in the block, because its masks ignore seeds and cannot be repeated. `weights`:
    as for `Snapshot`. Collective.
    """
    calls = trainer.loop.calls_at
    trainer.loop.calls_at = {point: [] for point in calls}
    draws = flow.get_rng_state()
    try:
        with rolled_back(trainer, weights) as python:
            for function in functions:
                python.add_function(function)
            for module in trainer.model.modules():
                if isinstance(module, STOCK_DROPOUTS):
                    vars(module)["p"] = 0.0  # an attribute, so it is restored
            if seed is not None:
                flow.manual_seed(seed)
            yield python
    finally:
        trainer.step.clear()
        trainer.loop.calls_at = calls
        if has_drawn_since(draws):
            flow.set_rng_state(draws)


@contextmanager
def forward_rolled_back(model: nn.Module, with_buffers: bool = True) -> Iterator[None]:
    """Put back what forwards of `model` change in the block.

    These are attributes, shared variables, the generators of Python and NumPy, and the values of
    buffers.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if with_buffers else []
    kept = Inventory(model.modules())
    with generators_kept():
        try:
            yield
        finally:
            kept.restore()
            with flow.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def has_drawn_since(state: flow.Tensor) -> bool:
    """Return whether any code has sampled from OneFlow's generator since its `state` was read."""
    return flow.get_rng_state().numpy().tobytes() != state.numpy().tobytes()
