"""A hook made of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from libai.engine.hook_base import HOOK_POINTS, STEP_POINTS, HookBase

Function = Callable[..., None]


class CallbackHook(HookBase):
    """Calls the given functions with the trainer: `CallbackHook(after_step=lambda trainer: print(trainer.iter))`.

    Args:
        every: call the functions of step points only in every n-th iteration.
        once: call each function only once, also across resumes.
        filter: called with the trainer before each function, which is skipped if the filter returns false.
        priority: see `HookBase`.
        functions: point of `HookBase` → function to call with the trainer. `before_save` is called with
            `(trainer, extra)`. None is the same as leaving the point out. A hook with `after_backward` does not work in
            graph mode.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        once: bool = False,
        filter: Callable[[Any], bool] | None = None,
        priority: int = 50,
        **functions: Function | None,
    ):
        unknown = sorted(functions.keys() - set(HOOK_POINTS))
        if unknown:
            raise TypeError(f"CallbackHook has no point {', '.join(unknown)}; there are {', '.join(HOOK_POINTS)}")
        self._functions = functions
        self._every, self._once, self._filter = every, once, filter
        self._done: set[str] = set()
        self.priority = priority
        for point, function in self._functions.items():
            if function is not None:
                setattr(self, point, self._caller(function, point))

    def overrides(self, point: str) -> bool:
        return self._functions.get(point) is not None

    def _caller(self, function: Function, point: str) -> Callable[..., None]:
        is_step = point in STEP_POINTS

        def call(*arguments: Any) -> None:
            if (is_step and (self.trainer.iter + 1) % self._every) or point in self._done:
                return
            if self._filter is not None and not self._filter(self.trainer):
                return
            if self._once:
                self._done.add(point)
            function(self.trainer, *arguments)

        return call

    def state_dict(self) -> dict[str, Any]:
        return {"done": sorted(self._done)} if self._done else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done = set(state["done"])
