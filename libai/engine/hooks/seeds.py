"""The global random generators, so that what draws from them continues after a resume as without one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow

from libai.engine.hook_base import HookBase
from libai.layers.random import fold
from libai.utils.distributed import any_rank, gather_objects, get_rank


class RandomStateHook(HookBase):
    """Saves and restores the generators of Python, numpy and oneflow, those of every rank.

    libai's own dropout needs none of them; models, data sets and hooks of the user may. The state of oneflow 0.9.0's
    generator cannot be read (docs/dev/oneflow.md#rng-state), only whether somebody has drawn: from then on it is seeded
    again in every iteration, from (seed, iteration), which costs 30 µs that runs without such draws need not pay.
    Graph mode has no such draws: a compiled random operation ignores every seed. `offset`: of `seed_everything`.
    """

    priority = 5

    def __init__(self, seed: int, offset: int = 0):
        self._seed, self._offset = seed, offset
        self._seeds_every_iteration = False
        self._seeded_at: int | None = None
        self._untouched = b""
        self._restored: dict[str, Any] | None = None

    def before_train(self) -> None:
        """Puts the generators where the saved run had them."""
        if self._restored is not None:
            _restore_python_and_numpy(self._restored)
            self._restored = None
        self._seed_oneflow(self.trainer.start_iter if self._seeded_at is None else self._seeded_at)

    def after_train(self) -> None:
        """Remembers where the generators are: training may continue in this process."""
        self._restored = _python_and_numpy()

    def before_step(self) -> None:
        """Seeds oneflow's generator when this run draws from it."""
        if self._seeds_every_iteration:
            self._seed_oneflow(self.trainer.iter)

    def after_step(self) -> None:
        """Looks, after the first iteration, whether the run draws from oneflow's generator."""
        if self.trainer.iter == self.trainer.start_iter:
            self._look_for_draws()

    def forget(self) -> None:
        """Start as if nothing had been saved (what a resume without random states would do)."""
        self._restored, self._seeded_at, self._seeds_every_iteration = None, None, False

    def _look_for_draws(self) -> None:
        has_drawn = any_rank(_oneflow_state() != self._untouched)
        if has_drawn and not self._seeds_every_iteration:
            self._seeds_every_iteration = True
            self._seed_oneflow(self.trainer.completed_iters)

    def _seed_oneflow(self, iteration: int) -> None:
        flow.manual_seed(fold(self._seed, iteration, get_rank()) & 0x7FFFFFFF)
        if not self._seeds_every_iteration:
            self._seeded_at, self._untouched = iteration, _oneflow_state()

    def state_dict(self) -> dict[str, Any]:
        """See `HookBase.state_dict`. Collective."""
        if self._seeded_at is not None and not self._seeds_every_iteration:
            self._look_for_draws()
        return {
            "seeds_every_iteration": self._seeds_every_iteration,
            "seeded_at": self._seeded_at,
            "ranks": gather_objects(_python_and_numpy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `HookBase.load_state_dict`. A rank that the saved run did not have keeps its own generators."""
        self._seeds_every_iteration, self._seeded_at = state["seeds_every_iteration"], state["seeded_at"]
        if get_rank() < len(state["ranks"]):
            self._restored = state["ranks"][get_rank()]


def _oneflow_state() -> bytes:
    return flow.get_rng_state().numpy().tobytes()


def _python_and_numpy() -> dict[str, Any]:
    """Both states as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"python": [version, list(words), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def _restore_python_and_numpy(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
