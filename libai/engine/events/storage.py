"""The scalars of each iteration, kept until a writer asks, also those still on the device.

Putting never waits for the device; asking does, once for everything that is pending. Nothing here writes files: see
`libai.engine.events.writers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any

import numpy as np
import oneflow as flow

from libai.utils.errors import UserError
from libai.utils.tensors import detached, fetch_scalars

_current: ContextVar[EventStorage | None] = ContextVar("libai_event_storage", default=None)


def get_event_storage() -> EventStorage:
    """The innermost `EventStorage` whose `with` block is running in this thread.

    Models, data and hooks that hold no trainer record through it: `get_event_storage().put_scalar("aux", value)`.
    """
    storage = _current.get()
    if storage is None:
        raise RuntimeError(
            "get_event_storage() was called outside of training: no EventStorage is open in this thread. "
            "trainer.train() opens one; elsewhere write `with EventStorage() as storage:` around the call."
        )
    return storage


class EventStorage:
    """The newest value of every scalar with its iteration.

    As a context manager it becomes what `get_event_storage()` returns; blocks may be nested.

    Attributes:
        iter: the 0-based iteration that values put now belong to; the trainer sets it.
    """

    def __init__(self, start_iter: int = 0):
        self.iter = start_iter
        self._latest: dict[str, tuple[Any, int]] = {}
        self._tokens: list[Token[EventStorage | None]] = []

    def __enter__(self) -> EventStorage:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())

    def step(self) -> None:
        """Go on to the next iteration, for loops without a trainer."""
        self.iter += 1

    # ------------------------------------------------------------------ putting

    def put_scalar(self, name: str, value: Any, cur_iter: int | None = None) -> None:
        """Record `value` under `name`: a number, or a one-element tensor.

        `cur_iter`: the 0-based iteration that it belongs to; default: the present one. A tensor is kept (detached) and
        fetched only when somebody asks; do not change it in place later.
        """
        at = self.iter if cur_iter is None else cur_iter
        if type(value) is not float:
            if isinstance(value, (int, float, np.number, np.bool_)):
                value = float(value)
            elif hasattr(value, "numpy"):
                # a kept loss must not keep the activations of its whole graph
                self._latest[name] = (detached(value) if getattr(value, "requires_grad", False) else value, at)
                return
            else:
                raise TypeError(
                    f"put_scalar({name!r}, ...) takes a number or a one-element tensor, not {type(value).__name__}: "
                    f"{value!r}."
                )
        self._latest[name] = (value, at)

    def put_scalars(self, *, cur_iter: Any = None, **scalars: Any) -> None:
        """Call `put_scalar` for each keyword; `put_scalars(**{"eval/val/loss": 2.3})` for tags."""
        for name, value in scalars.items():
            self.put_scalar(name, value, cur_iter)

    # ------------------------------------------------------------------ asking

    def latest(self) -> dict[str, tuple[float, int]]:
        """Every scalar's newest value and its iteration. Waits for the device, once, when tensors are pending.

        Collective when one of them is a global tensor. To look at one scalar use `get`, which fetches only that.
        """
        pending = [name for name, (value, _) in self._latest.items() if type(value) is not float]
        if pending:
            values = _fetch({name: self._latest[name][0] for name in pending})
            for name in pending:
                self._latest[name] = (values[name], self._latest[name][1])
        return dict(self._latest)

    def names(self, prefix: str = "") -> list[str]:
        """The scalars put so far whose names begin with `prefix`. Waits for nothing."""
        return [name for name in self._latest if name.startswith(prefix)]

    def get(self, name: str) -> tuple[float, int] | None:
        """The newest value of `name` and its iteration, or None; waits for the device only if this one is there."""
        found = self._latest.get(name)
        if found is not None and type(found[0]) is not float:
            found = self._latest[name] = (_fetch({name: found[0]})[name], found[1])
        return found

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: iteration and newest finite values. Waits for the device as `latest` does."""
        return {
            "iter": self.iter,
            "latest": {name: list(found) for name, found in self.latest().items() if math.isfinite(found[0])},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back `state_dict()`."""
        self.iter = int(state["iter"])
        self._latest = {name: (float(value), int(at)) for name, (value, at) in state["latest"].items()}


def _fetch(scalars: Mapping[str, Any]) -> dict[str, float]:
    """The values of one-element tensors, all that OneFlow holds together, others one by one."""
    for name, tensor in scalars.items():
        shape = tuple(getattr(tensor, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(f"the scalar {name!r} is a tensor of shape {shape}. Put one element, such as its mean().")
        if getattr(tensor, "is_lazy", False):
            raise UserError(
                f"the scalar {name!r} was put from inside a compiled graph, where tensors have no values. Return it "
                'from forward instead: {"losses": {...}, "metrics": {' + repr(name) + ": value}}."
            )
    ours = [name for name, tensor in scalars.items() if isinstance(tensor, flow.Tensor)]
    fetched = dict(zip(ours, fetch_scalars([scalars[name] for name in ours])))
    return {
        name: float((fetched[name] if name in fetched else np.asarray(tensor.numpy())).reshape(()))
        for name, tensor in scalars.items()
    }
