"""A hook made of plain functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from libai.engine.hook_base import HOOK_POINTS, STEP_POINTS, HookBase
from libai.engine.loop import TrainerBase


class CallbackHook(HookBase):
    """Calls the given functions with the trainer: `CallbackHook(after_step=lambda trainer:
    print(trainer.iter))`.

    Args:
        every: call the functions of step points only every `every` iterations.
        priority: see `HookBase`.
        functions: point of `HookBase` → function to call with the trainer. `before_save` is called
            with `(trainer, extra)`. None is the same as leaving the point out. A hook with
            `after_backward` does not work in graph mode.
    """

    trainer: TrainerBase

    def __init__(
        self, *, every: int = 1, priority: int = 50, **functions: Callable[..., None] | None
    ):
        unknown = sorted(functions.keys() - set(HOOK_POINTS))
        if unknown:
            raise TypeError(
                f"CallbackHook has no point {', '.join(unknown)}; choose from "
                f"{', '.join(HOOK_POINTS)}"
            )
        self.priority = priority
        self._every = every
        self._functions = functions
        for point, function in functions.items():
            if function is not None:
                setattr(self, point, partial(self._call, point, function))

    def overrides(self, point: str) -> bool:
        return self._functions.get(point) is not None

    def _call(self, point: str, function: Callable[..., None], *arguments: Any) -> None:
        if point not in STEP_POINTS or (self.trainer.iter + 1) % self._every == 0:
            function(self.trainer, *arguments)
