"""Save everything that updates of a trainer change, and put it back at the end of a block.

The position of the data is saved elsewhere (`DataFeed.read_ahead`). Iterators that cannot be
copied are not put back (`PythonKept.iterators`).
"""

from __future__ import annotations

import collections
import copy
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.rehearsal.comparison import is_same
from libai.engine.snapshot import Snapshot
from libai.engine.trainer import ModelTrainer
from libai.forward.python_state import (
    MAX_DEPTH,
    NOT_COMPARED,
    OF_MODULE,
    RANDOM,
    SIMPLE,
    cannot_go_back,
    container_in,
    copy_of_iterator,
    depth_inside,
    hooks_of,
    is_iterator,
    is_of_library,
    is_users,
    owners_of,
    values_in,
    variables_of,
)
from libai.layers.random import STOCK_DROPOUTS
from libai.utils.distributed import barrier
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.seeding import generators_kept
from libai.utils.tensors import local_part

#: containers whose contents are put back in place
_REFILLED = (dict, set, list, collections.deque)
#: other values with contents that code can change
_CHANGING = (flow.Tensor, np.ndarray, *RANDOM)
#: optimizer attributes that `Snapshot` already holds
_IN_SNAPSHOT = frozenset({"param_groups", "_state"})


class PythonKept:
    """Keeps what Python code can change: attributes, class attributes, closures, globals, contents
    of containers.

    Args:
        roots: modules, optimizers and schedules. `restore` restores their attributes, and in place
            the contents of everything that the attributes hold. The values of buffers are left out.

    Attributes:
        iterators: names of iterators that cannot be copied and therefore cannot be put back.
        called: the user's functions that ran between `watch` and `stop`. Gradient hooks, for
            example, are found this way, because OneFlow has no list of them.
    """

    def __init__(self, roots: Iterable[Any]):
        self.iterators: list[str] = []
        self.called: list[Any] = []
        self._put_back: list[Callable[[], None]] = []
        self._functions: set[Any] = set()
        #: classes, functions and globals to which nothing may be added, by id
        self._owners: dict[int, Any] = {}
        #: keeps the objects alive, because the id of a freed one could be reused
        self._seen: dict[int, Any] = {}
        #: id of an object → smallest number of containers around it so far
        self._depths: dict[int, int] = {}
        for root in roots:
            self._keep_root(root)

    @classmethod
    def of_trainer(cls, trainer: ModelTrainer) -> PythonKept:
        """Keep what a trainer's modules, optimizers and schedule hold, and what their code and
        hooks can reach.
        """
        optimizers = [trainer.optimizer, *getattr(trainer.optimizer, "optimizers", {}).values()]
        owners = [one for one in (*optimizers, trainer.lr_scheduler) if hasattr(one, "__dict__")]
        return cls([*trainer.model.modules(), *owners])

    def restore(self) -> None:
        """Put everything back."""
        for put_back in self._put_back:
            put_back()

    def watch(self) -> None:
        """Until `stop`, also keep what each of the user's functions can reach, before its first
        call.

        Does nothing while another profiler is active.
        """
        if sys.getprofile() is None:
            sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop watching. Costs nothing if this object is not watching."""
        if sys.getprofile() == self._note:
            sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in self._seen:
            self._seen[id(code)] = code
            if is_users(frame.f_globals.get("__name__", "")):
                found = [one for one in gc.get_referrers(code) if type(one) is types.FunctionType]
                self.called += found
                for one in found:
                    self.keep_function(one)

    def _keep_root(self, root: Any) -> None:
        """Keep the attributes of `root`, and everything that the methods of its user-defined
        classes can reach.
        """
        label, skip = type(root).__name__, _IN_SNAPSHOT
        if isinstance(root, nn.Module):
            skip = OF_MODULE
            for held in (
                root._modules,
                root._parameters,
                root._buffers,
            ):  # not the values of tensors
                self._put_back.append(partial(_refill, held, dict(held)))
            self._keep(hooks_of(root), label)
        self._keep_entries(vars(root), label, skip)
        for cls in type(root).__mro__:
            if id(cls) in self._seen or not is_users(cls.__module__):
                continue
            self._seen[id(cls)] = cls
            self._drop_new(cls, vars(cls))
            for name, value in list(vars(cls).items()):
                if isinstance(value, types.FunctionType):
                    self.keep_function(value)
                elif (
                    not name.startswith("__")
                    and not callable(value)
                    and not hasattr(value, "__get__")
                ):
                    self._keep_variable(
                        partial(vars(cls).get, name),
                        partial(setattr, cls, name),
                        f"{cls.__name__}.{name}",
                    )

    def keep_function(self, function: Any) -> None:
        """Keep the globals, closure and defaults of a user's function, and do the same for
        functions in them.
        """
        known = set(self._functions)
        for name, read, assign in variables_of([function], self._functions):
            value = read()
            if not isinstance(value, type) and not hasattr(value, "__get__"):
                self._keep_variable(read, assign, name)
        for one in self._functions - known:
            for owner in owners_of(one):
                self._drop_new(owner, owner if isinstance(owner, dict) else vars(owner))
            self._keep([one.__defaults__, one.__kwdefaults__], one.__qualname__)

    def _keep_entries(
        self, owner: dict[str, Any], label: str, skip: frozenset[str] = frozenset()
    ) -> None:
        """Keep the entries of `owner` except `skip`.

        Restoring also deletes entries added since then.
        """
        known = skip.union(owner)

        def drop_new() -> None:
            for name in owner.keys() - known:
                del owner[name]

        self._put_back.append(drop_new)
        for name in sorted(known - skip):
            self._keep_variable(
                partial(owner.get, name), partial(owner.__setitem__, name), f"{label}.{name}"
            )

    def _keep_variable(
        self, read: Callable[[], Any], assign: Callable[[Any], None], name: str
    ) -> None:
        value = read()
        if cannot_go_back(value):
            self.iterators.append(name)
        kept = copy_of_iterator(value)

        def put_back() -> None:
            # some classes, such as enumerations, refuse even the value that they have
            if kept is not value or read() is not value:
                assign(copy_of_iterator(kept))

        self._put_back.append(put_back)
        self._keep(value, name)

    def _drop_new(self, owner: Any, scope: Mapping[str, Any]) -> None:
        """Delete on restoring what code has added to `scope`, the attributes of a class or function
        (`owner`), or the names of a module (`owner` is the scope itself).

        Modules that were imported and names with two underscores stay.
        """
        if id(owner) in self._owners:
            return
        self._owners[id(owner)] = owner
        known = set(scope)

        def drop_new() -> None:
            for name in scope.keys() - known:
                if name.startswith("__") or isinstance(scope[name], types.ModuleType):
                    continue
                if isinstance(owner, dict):
                    del owner[name]
                else:
                    delattr(owner, name)

        self._put_back.append(drop_new)

    def _keep(self, value: Any, name: str, depth: int = 0, is_own: bool = True) -> None:
        """Keep the contents of `value`, which is inside `depth` containers and objects.

        `is_own`: false if one of them is an object of a library, whose contents are less likely to
        matter.
        """
        if isinstance(value, (*SIMPLE, *NOT_COMPARED)):
            return
        if isinstance(value, types.FunctionType):
            self.keep_function(value)
            return
        held = container_in(value)
        if depth > MAX_DEPTH:
            if is_own and (held or isinstance(held, _REFILLED) or isinstance(value, _CHANGING)):
                _warn_of_depth(name)
            return
        known_depth = self._depths.get(id(value), MAX_DEPTH + 1)
        if known_depth <= depth:
            return
        self._depths[id(value)] = depth
        if known_depth > MAX_DEPTH:
            self._seen[id(value)] = value
            self._keep_contents(value, held)
        is_own = is_own and not is_of_library(value)
        for one in values_in(held):
            is_fixed = not isinstance(held, _REFILLED) and container_in(one) is None
            if is_own and is_iterator(one) and (is_fixed or cannot_go_back(one)):
                self.iterators.append(name)
            self._keep(one, name, depth_inside(value, depth), is_own)
        call = type(value).__call__ if callable(value) else None
        if isinstance(call, types.FunctionType):
            self.keep_function(call)

    def _keep_contents(self, value: Any, held: Any) -> None:
        """Keep what `value` contains, but not the contents of what it contains.

        `held`: the result of `container_in`.
        """
        kind = type(value)
        if kind in RANDOM:
            self._put_back.append(partial(kind.__setstate__, value, kind.__getstate__(value)))
        elif isinstance(value, flow.Tensor):
            if not value.is_lazy:
                self._put_back.append(partial(_put_values, value, copy_of_values(value)))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._put_back.append(partial(np.copyto, value, np.copy(value)))
        elif isinstance(held, _REFILLED):
            self._put_back.append(partial(_refill, held, _copied(held)))


def _warn_of_depth(name: str) -> None:
    warn_once(
        logger,
        f"depth of {name}",
        f"{name} holds values inside more than {MAX_DEPTH} containers and objects. If an update "
        "changes them, the updates that are rehearsed before training do not undo it, and a "
        "compiled step does not see it. Nest the values less deeply, or keep them in buffers "
        "(`register_buffer`).",
    )


def copy_of_values(tensor: flow.Tensor) -> flow.Tensor:
    """Return a copy of a tensor without its history."""
    return tensor.detach().clone()


def _put_values(tensor: flow.Tensor, values: flow.Tensor) -> None:
    if not is_same(local_part(tensor).numpy(), local_part(values).numpy()):
        with flow.no_grad():
            tensor.data.copy_(values)


def _copied(container: Any) -> Any:
    """Return a copy of a container, in which iterators keep their positions."""
    copied = copy.copy(container)
    if isinstance(container, dict):
        copied.update(
            {key: copy_of_iterator(one) for key, one in container.items() if is_iterator(one)}
        )
    elif any(map(is_iterator, container)):
        _fill(copied, map(copy_of_iterator, container))
    return copied


def _refill(container: Any, contents: Any) -> None:
    _fill(container, _copied(contents))  # a copy, because they may be put back again


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    fill = container.update if isinstance(container, dict | set) else container.extend
    fill(contents)


@contextmanager
def rolled_back(
    trainer: ModelTrainer,
    weights: Mapping[str, np.ndarray] | None = None,
) -> Iterator[PythonKept]:
    """Put the state of `trainer` back at the end of the block.

    This includes its iteration, the generators of Python and NumPy, and the Python values that the
    code of its model, optimizer and schedule keeps. Inside the block `trainer.lr_scheduler` may be
    replaced. `weights`: as for `Snapshot`. Collective.
    """
    iteration = trainer.iter
    schedule = trainer.lr_scheduler
    parameters = [(one, one.requires_grad, one.grad) for one in trainer.model.parameters()]
    python = PythonKept.of_trainer(trainer)
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

    `PythonKept` puts back what the schedule itself holds. A copy also protects values that Python
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
) -> Iterator[PythonKept]:
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
                python.keep_function(function)
            for module in trainer.model.modules():
                if isinstance(module, STOCK_DROPOUTS):
                    vars(module)["p"] = 0.0  # an attribute, so it is restored
            if seed is not None:
                flow.manual_seed(seed)
            yield python
    finally:
        trainer.gradients.clear()
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
    kept = PythonKept(model.modules())
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
