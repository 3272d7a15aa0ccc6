"""Save and restore the global random generators, so a resume continues their sequence of random
numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow

from libai.data.random_state import nobody_reads
from libai.engine.hook_base import HookBase
from libai.engine.loop import TrainerBase
from libai.engine.rehearsal.kept import has_drawn_since
from libai.layers.random import fold
from libai.utils.distributed import any_rank, gather_objects, get_rank
from libai.utils.logging import engine_logger as logger

_LATE = (
    "OneFlow's global generator was not used in iteration %d, but has been used by iteration %d. "
    "Random numbers sampled from it in between differ in the next run; from now on they depend on "
    "the seed and the iteration. Use it from the first iteration on, or use seeded layers "
    "(docs/model_and_data.md#randomness)."
)


class RandomStateHook(HookBase):
    """Saves and restores the generators of Python, numpy and oneflow on every rank.

    libai's own dropout uses none of them, but the user's models and hooks may. Samples of datasets
    are seeded by their loader. The state of oneflow 0.9.0's generator cannot be restored
    (docs/dev/oneflow.md#rng-state); it only shows whether a random number was sampled. After the
    first sample, the generator is seeded from (seed, iteration, rank) in every iteration. This
    costs 30 µs per iteration, but only in runs that sample from the generator. Graph mode does not
    sample from it, because a compiled random operation ignores every seed.
    """

    trainer: TrainerBase

    priority = 5

    def __init__(self, seed: int):
        self._seed = seed
        #: true once the run samples from oneflow's generator
        self._seeds_always = False
        self._seeded_at: int | None = None
        self._untouched: Any = None
        self._restored: dict[str, Any] | None = None

    def before_train(self) -> None:
        """Restores the generators to their state in the saved run."""
        if self._restored is not None:
            _restore_python_and_numpy(self._restored)
            self._restored = None
        self._seed_oneflow(self.trainer.start_iter if self._seeded_at is None else self._seeded_at)

    def after_train(self) -> None:
        """Stores the state of the generators, because training may continue in this process."""
        if self.trainer.status != "failed":  # otherwise the ranks may be at different points
            self._look_for_draws()
        self._restored = _python_and_numpy()

    def before_step(self) -> None:
        """Seeds oneflow's generator if this run samples from it."""
        if self._seeds_always:
            self._seed_oneflow(self.trainer.iter)

    def after_step(self) -> None:
        """Checks after the first iteration if the run samples from oneflow's generator."""
        if self.trainer.iter == self.trainer.start_iter:
            self._look_for_draws()

    def _look_for_draws(self) -> None:
        if self._seeds_always or self._untouched is None:
            return
        with nobody_reads():
            has_drawn = has_drawn_since(self._untouched)
        if not any_rank(has_drawn):
            return
        self._seeds_always = True
        self._seed_oneflow(self.trainer.completed_iters)
        if self.trainer.iter > self.trainer.start_iter:
            logger.warning(_LATE, self.trainer.start_iter + 1, self.trainer.completed_iters)

    def _seed_oneflow(self, iteration: int) -> None:
        with nobody_reads():
            flow.manual_seed(fold(self._seed, iteration, get_rank()) & 0x7FFFFFFF)
            if not self._seeds_always:
                self._seeded_at = iteration
                self._untouched = flow.get_rng_state()

    def state_dict(self) -> dict[str, Any]:
        """See `HookBase.state_dict`. Collective."""
        self._look_for_draws()
        return {
            "seeds_every_iteration": self._seeds_always,
            "seeded_at": self._seeded_at,
            "ranks": gather_objects(_python_and_numpy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `HookBase.load_state_dict`.

        A rank that the saved run did not have keeps its own state.
        """
        self._seeds_always = state["seeds_every_iteration"]
        self._seeded_at = state["seeded_at"]
        if get_rank() < len(state["ranks"]):
            self._restored = state["ranks"][get_rank()]


def _python_and_numpy() -> dict[str, Any]:
    """Return the states of both generators as JSON-serializable values."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def _restore_python_and_numpy(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
