"""From the results of updates, which stay on the device, to numbers that are known to be finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

#: results are fetched at the latest after this many iterations, so that a long `log_period` cannot hoard tensors
MAX_PENDING_RESULTS = 200


class NonFiniteLoss(FloatingPointError):
    """A loss became NaN or infinite; `.iteration` (1 = after the first update) and `.losses` say where and which."""

    #: the tools print its text without a traceback, which would tell nothing more
    explains_itself = True

    def __init__(self, iteration: int, losses: Mapping[str, float], updated: bool, diagnosis: str = ""):
        self.iteration, self.losses, self.diagnosis = iteration, dict(losses), diagnosis
        effect = (
            "The update was made before this was seen, so the weights in memory are corrupted; no checkpoint holds them"
            if updated
            else "The update was not made, the weights are those of the iteration before"
        )
        found = f"iteration {iteration} is not finite: {dict(losses)}. {f'{diagnosis}. ' if diagnosis else ''}"
        more = "" if diagnosis else " train.replay_non_finite=true undoes the update and names the first bad module."
        super().__init__(
            f"{found}{effect}. Lower the learning rate, clip the gradients (train.clip_grad.max_norm), or leave such "
            f"updates out (train.non_finite=skip).{more}"
        )


class LossGuard:
    """What a loop does about a loss that is not finite. This one keeps nothing, and ends training."""

    def before_update(self, iteration: int, micro_batches: list[Any]) -> None:
        """Called before every update."""

    def all_finite(self) -> None:
        """Called when all losses up to now have been found finite."""

    def resolve(self, iteration: int, losses: Mapping[str, float], latest: dict[str, float]) -> dict[str, float]:
        """Called for the first iteration (0-based) whose loss is not finite; raises, or returns the numbers to log
        for the latest iteration in place of `latest`. Collective."""
        raise NonFiniteLoss(iteration + 1, losses, updated=True)

    def forget(self) -> None:
        """Called when the state has been changed by something else than an update."""


class PendingMetrics:
    """Results that wait for a log point, and the numbers of the iteration that was fetched last.

    Attributes:
        pending: `(0-based iteration, what its update has returned)`.
        latest: the numbers fetched last, keyed by tag.
        losses: `(iteration, train/loss)` of the updates fetched last, as far as they are finite; 1 is the first.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, Any]] = []
        self.latest: Mapping[str, float] = {}
        self.losses: deque[tuple[int, float]] = deque(maxlen=2 * MAX_PENDING_RESULTS)
        self._completed = 0

    def fetch(self, collect: Callable[[list[Any]], list[dict[str, float]]], guard: LossGuard) -> None:
        """Let `collect` turn all results into numbers, and `guard` act on the first whose loss is not finite."""
        if not self.pending:
            return
        results, self.pending = self.pending, []
        numbers = collect([result for _, result in results])
        bad = next((i for i, values in enumerate(numbers) if not math.isfinite(values["train/loss"])), None)
        if bad is None:
            guard.all_finite()
        else:
            numbers[-1] = guard.resolve(results[bad][0], numbers[bad], numbers[-1])
        self._completed, self.latest = results[-1][0] + 1, numbers[-1]
        losses = [(iteration + 1, values["train/loss"]) for (iteration, _), values in zip(results, numbers)]
        self.losses.extend(pair for pair in losses if math.isfinite(pair[1]))

    def of(self, completed_iters: int) -> dict[str, float]:
        """The numbers fetched last when they are those after `completed_iters` updates; otherwise none."""
        return dict(self.latest) if completed_iters == self._completed else {}

    def state_dict(self, completed_iters: int) -> dict[str, str]:
        """`of`, as text: that can be inf, JSON cannot."""
        return {tag: repr(value) for tag, value in self.of(completed_iters).items()}

    def load_state_dict(self, completed_iters: int, state: Mapping[str, str]) -> None:
        """Take back `state_dict`."""
        self._completed, self.latest = completed_iters, {tag: float(text) for tag, text in state.items()}
