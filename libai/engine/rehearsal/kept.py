"""Everything that updates of a trainer change, put back at the end of a block.

Not here: the position of the data (`DataFeed.read_ahead`). Not put back: what closures of gradient hooks hold, and
iterators without a copy (`PythonKept.iterators`).
"""

from __future__ import annotations

import collections
import copy
import functools
import gc
import logging
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.snapshot import Snapshot
from libai.forward.python_state import (
    NOT_COMPARED,
    PACKAGES,
    RANDOM_STATES,
    SIMPLE,
    cannot_go_back,
    copy_of_iterator,
    hooks_of,
    is_users_frame,
    plain_attributes,
    variables_of,
)
from libai.utils.distributed import barrier
from libai.utils.seeding import generators_kept
from libai.utils.tensors import local_part

logger = logging.getLogger("libai.engine")
#: containers in objects in containers: deeper than this nothing is kept
_MAX_DEPTH = 6
#: attributes of an optimizer that `Snapshot` holds
_IN_SNAPSHOT = ("param_groups", "_state")


class PythonKept:
    """Keeps what Python code can change: attributes, class attributes, closures, globals, contents of containers.

    Args:
        roots: modules, optimizers, schedules and functions. Of them, and of what they hold, `restore` puts back the
            names and what they refer to, in place.

    Attributes:
        iterators: names that hold iterators without a copy, which nothing can put back.
    """

    def __init__(self, roots: Iterable[Any]):
        self.iterators: list[str] = []
        self._put_back: list[Callable[[], None]] = []
        self._functions: set[Any] = set()
        self._seen: dict[int, Any] = {}  # holds the objects, whose ids would be given to others
        self._random = random.getstate(), np.random.get_state(legacy=True)
        for root in roots:
            if isinstance(root, types.FunctionType):
                self._keep_function(root)
            else:
                self._keep_root(root)

    @classmethod
    def of_model(cls, model: nn.Module) -> PythonKept:
        """Keep what the modules of `model` hold, and what their code and hooks can reach."""
        return cls(model.modules())

    @classmethod
    def of_trainer(cls, trainer: Any) -> PythonKept:
        """Keep the same of a trainer's model, optimizers and schedule."""
        optimizers = [trainer.optimizer, *getattr(trainer.optimizer, "optimizers", {}).values()]
        owners = [one for one in (*optimizers, trainer.lr_scheduler) if hasattr(one, "__dict__")]
        return cls([*trainer.model.modules(), *owners])

    def restore(self) -> None:
        """Put everything back."""
        for restore in self._put_back:
            restore()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])

    def _keep_root(self, root: Any) -> None:
        """Keep the attributes of `root`, and what the methods of the user's classes in it can reach."""
        label = type(root).__name__
        if isinstance(root, nn.Module):
            self._keep_names(vars(root), [*plain_attributes(root)], label, lambda: plain_attributes(root))
            self._keep_names(root._buffers, [*root._buffers], label, lambda: root._buffers, is_deep=False)
            for hook in hooks_of(root):
                self._keep(hook, label, 0)
        else:
            own = [name for name in vars(root) if name not in _IN_SNAPSHOT]
            self._keep_names(vars(root), own, label, lambda: vars(root).keys() - set(_IN_SNAPSHOT))
        for cls in type(root).__mro__:
            if cls is not object and cls.__module__.split(".")[0] not in PACKAGES:
                self._keep_class(cls)

    def _keep_class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen[id(cls)] = cls
        for name, value in list(vars(cls).items()):
            if isinstance(value, types.FunctionType):
                self._keep_function(value)
            elif not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                self._keep_slot(
                    value, functools.partial(setattr, cls, name), f"the class attribute {cls.__name__}.{name}"
                )

    def _keep_function(self, function: Any) -> None:
        """Keep the globals, closure and defaults of a function of the user's, and those of functions in them."""
        known = set(self._functions)
        for name, read, assign in variables_of([function], self._functions):
            if not isinstance(read(), types.FunctionType | type):
                self._keep_slot(read(), assign, name)
        for one in self._functions - known:
            for value in (one.__defaults__, one.__kwdefaults__):
                self._keep(value, one.__qualname__, 0)

    def _keep_names(
        self,
        owner: dict[str, Any],
        names: list[str],
        label: str,
        now: Callable[[], Iterable[str]],
        is_deep: bool = True,
    ) -> None:
        """Keep the entries `names` of `owner`; `now` returns those that may be there later, of which new ones go."""

        def drop_new() -> None:
            for name in list(now()):
                if name not in names:
                    del owner[name]

        self._put_back.append(drop_new)
        for name in names:  # not by `setattr`, which the guards of a graph count
            self._keep_slot(owner[name], functools.partial(owner.__setitem__, name), f"{label}.{name}", is_deep)

    def _keep_slot(self, value: Any, assign: Callable[[Any], None], name: str, is_deep: bool = True) -> None:
        if cannot_go_back(value):
            self.iterators.append(name)
        kept = copy_of_iterator(value)
        self._put_back.append(lambda: assign(copy_of_iterator(kept)))
        if is_deep:
            self._keep(value, name, 0)

    def _keep(self, value: Any, name: str, depth: int) -> None:
        """Keep the contents of `value`."""
        if depth > _MAX_DEPTH or id(value) in self._seen or isinstance(value, (*SIMPLE, *NOT_COMPARED)):
            return
        if isinstance(value, types.FunctionType):
            self._keep_function(value)
            return
        self._seen[id(value)] = value
        inner: Iterable[Any] = ()
        if isinstance(value, flow.Tensor):
            if not value.is_lazy:
                self._put_back.append(functools.partial(_put_values, value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._put_back.append(functools.partial(np.copyto, value, value.copy()))
        elif type(value) in RANDOM_STATES:
            read, write = RANDOM_STATES[type(value)]
            self._put_back.append(functools.partial(write, value, read(value)))
        elif isinstance(value, dict | set):
            inner = list(value.values()) if isinstance(value, dict) else ()
            self._put_back.append(functools.partial(_refill, value, value.update, copy.copy(value)))
        elif isinstance(value, list | collections.deque):
            inner = list(value)
            self._put_back.append(functools.partial(_refill, value, value.extend, list(value)))
        elif isinstance(value, tuple):
            inner = value
        elif isinstance(value, functools.partial):
            inner = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            inner = (value.__self__, value.__func__)
        elif isinstance(getattr(value, "__dict__", None), dict):
            inner = (vars(value), *([type(value).__call__] if callable(value) else []))
        for one in inner:
            self._keep(one, name, depth + 1)


def _put_values(tensor: flow.Tensor, values: flow.Tensor) -> None:
    if not np.array_equal(local_part(tensor).numpy(), local_part(values).numpy(), equal_nan=tensor.is_floating_point()):
        with flow.no_grad():
            tensor.data.copy_(values)


def _refill(value: Any, fill: Callable[[Any], None], contents: Any) -> None:
    value.clear()
    fill(contents)


class CalledFunctions:
    """The user's functions that run while `watching` is on, such as hooks of gradients, of which OneFlow has no list.

    `restore()` puts back what they had in closures and globals before their first call.
    """

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self._kept: list[PythonKept] = []
        self._known: set[types.CodeType] = set()

    def watch(self) -> None:
        """Begin to watch, unless somebody else does; ends with `stop`."""
        if sys.getprofile() is None:
            sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop watching; free when nobody watches."""
        if sys.getprofile() == self._note:
            sys.setprofile(None)

    def restore(self) -> None:
        """Put everything back."""
        for kept in self._kept:
            kept.restore()

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code in self._known:
            return
        self._known.add(frame.f_code)
        if is_users_frame(frame):
            found = [one for one in gc.get_referrers(frame.f_code) if isinstance(one, types.FunctionType)]
            self.functions += found
            self._kept.append(PythonKept(found))


@contextmanager
def rolled_back(trainer: Any) -> Iterator[None]:
    """Put the state of `trainer`, its iteration, and the generators of Python and NumPy, back at the end of the block;
    also what the code of its model, optimizer and schedule keeps in Python.

    Within it the schedule is a copy, which may be replaced. Collective.
    """
    iteration = trainer.iter
    schedule = trainer.lr_scheduler
    python = PythonKept.of_trainer(trainer)
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
            python.restore()
            trainer.lr_scheduler = None
            before.restore(trainer)
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
    kept = PythonKept.of_model(model)
    with generators_kept():
        try:
            yield
        finally:
            kept.restore()


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
