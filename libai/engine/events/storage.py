"""The scalars of each iteration, kept until a writer asks, also those still on the device.

Putting never waits for the device; asking does, once for everything that is pending. Nothing here writes files: see
`libai.engine.events.writers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

    # ------------------------------------------------------------------ putting

    def put_scalar(self, name: str, value: Any, cur_iter: int | None = None) -> None:
        """Record `value` under `name`: a number, or a tensor with one element.

        `cur_iter`: the 0-based iteration that it belongs to; default: the present one. A tensor is kept (detached) and
        fetched only when somebody asks; do not change it in place later.
        """
        if isinstance(value, flow.Tensor):
            _check_tensor(name, value)
            value = detached(value)  # a kept loss must not keep the activations of its whole graph
        elif isinstance(value, (int, float, np.number, np.bool_)):
            value = float(value)
        else:
            raise TypeError(
                f"put_scalar({name!r}, ...) takes a number or a one-element tensor, not {type(value).__name__}: "
                f"{value!r}."
            )
        self._latest[name] = (value, self.iter if cur_iter is None else cur_iter)

    def put_scalars(self, *, cur_iter: Any = None, **scalars: Any) -> None:
        """Call `put_scalar` for each keyword; `put_scalars(**{"eval/val/loss": 2.3})` for tags."""
        for name, value in scalars.items():
            self.put_scalar(name, value, cur_iter)

    # ------------------------------------------------------------------ asking

    def latest(self) -> dict[str, tuple[float, int]]:
        """Every scalar's newest value and its iteration. Waits for the device, once, when tensors are pending.

        Collective when one of them is a global tensor. To look at one scalar use `get`, which fetches only that.
        """
        self._fetch([name for name, (value, _) in self._latest.items() if type(value) is not float])
        return dict(self._latest)

    def names(self, prefix: str = "") -> list[str]:
        """The scalars put so far whose names begin with `prefix`. Waits for nothing."""
        return [name for name in self._latest if name.startswith(prefix)]

    def get(self, name: str) -> tuple[float, int] | None:
        """The newest value of `name` and its iteration, or None; waits for the device only if this one is there."""
        found = self._latest.get(name)
        if found is not None and type(found[0]) is not float:
            self._fetch([name])
            found = self._latest[name]
        return found

    def _fetch(self, names: Sequence[str]) -> None:
        values = fetch_scalars([self._latest[name][0] for name in names]) if names else []
        for name, value in zip(names, values):
            self._latest[name] = (value.item(), self._latest[name][1])

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: iteration and newest finite values. Waits for the device as `latest` does."""
        latest = {name: list(found) for name, found in self.latest().items() if math.isfinite(found[0])}
        return {"iter": self.iter, "latest": latest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back `state_dict()`."""
        self.iter = int(state["iter"])
        self._latest = {name: (float(value), int(at)) for name, (value, at) in state["latest"].items()}


def _check_tensor(name: str, tensor: flow.Tensor) -> None:
    shape = tuple(tensor.shape)
    if math.prod(shape) != 1:
        raise ValueError(f"the scalar {name!r} is a tensor of shape {shape}. Put one element, such as its mean().")
    if tensor.is_lazy:
        raise UserError(
            f"the scalar {name!r} was put from inside a compiled graph, where tensors have no values. Return it "
            'from forward instead: {"losses": {...}, "metrics": {' + repr(name) + ": value}}."
        )
