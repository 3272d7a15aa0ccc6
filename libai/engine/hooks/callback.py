"""A hook made of plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libai.engine.loop.hook_base import HookBase


class CallbackHook(HookBase):
    """Calls the given functions with the trainer: `CallbackHook(after_step=lambda trainer: print(trainer.iter))`.

    Args:
        before_train, after_train, before_step, after_step: functions of one argument, the trainer.
        after_backward: likewise; eager mode only, so giving one makes the hook refuse graph mode.
        every: call the step functions in every n-th iteration only.
        priority: see `HookBase`.
    """

    def __init__(
        self,
        *,
        before_train: Callable[[Any], None] | None = None,
        after_train: Callable[[Any], None] | None = None,
        before_step: Callable[[Any], None] | None = None,
        after_backward: Callable[[Any], None] | None = None,
        after_step: Callable[[Any], None] | None = None,
        every: int = 1,
        priority: int = 50,
    ):
        self._functions = {
            "before_train": before_train,
            "after_train": after_train,
            "before_step": before_step,
            "after_backward": after_backward,
            "after_step": after_step,
        }
        self._every = every
        self.priority = priority
        for point, function in self._functions.items():
            if function is not None:
                setattr(self, point, self._caller(function, is_step=point not in ("before_train", "after_train")))

    def overrides(self, point: str) -> bool:
        """See `HookBase.overrides`."""
        return self._functions.get(point) is not None

    def _caller(self, function: Callable[[Any], None], is_step: bool) -> Callable[[], None]:
        def call() -> None:
            if not is_step or (self.trainer.iter + 1) % self._every == 0:
                function(self.trainer)

        return call
