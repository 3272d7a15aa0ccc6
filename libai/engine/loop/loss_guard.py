"""Losses that are bad, not finite or far above the recent ones: how they are found and what they raise."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")

#: with as many spikes in a row, the loss is not an outlier any more
MAX_SPIKES_IN_A_ROW = 10
_DONE = {"warn": "", "raise": "", "skip": "; its update is left out", "rollback": "; back to the last good state"}


class LossSpikes:
    """Finds them, and keeps count.

    A loss is a spike when it is more than `threshold` standard deviations above the median of the last `window`, by
    their median absolute deviation, which other spikes hardly change. `MAX_SPIKES_IN_A_ROW` of them in a row end
    training instead of being left out. With "rollback" they are in a row when all losses that were fetched at once had
    to be dropped each time.

    Args:
        threshold: in standard deviations.
        action: "warn" keeps the update; "raise" undoes it and ends training; "skip" leaves it out; "rollback" goes back
            to the last copy of the state, and the data continues.
        window: how many losses are remembered; with fewer than 10 none is judged.
    """

    def __init__(self, threshold: float = 6.0, action: str = "warn", window: int = 100):
        if action not in _DONE:
            raise UserError(f"action={action!r} is nothing to do about a loss spike. Choose one of {', '.join(_DONE)}.")
        self.action = action
        self.count = self.in_a_row = 0
        self.description = ""
        self._threshold, self._recent = threshold, deque[float](maxlen=window)

    def judge(self, iteration: int, loss: float) -> bool:
        """Whether the update of `iteration` (1 is the first) must be undone. Call it once for each, in order."""
        if not self._is_spike(loss):
            self._recent.append(loss)
            if self.action != "rollback":
                self.in_a_row = 0
            return False
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        self.description = (
            f"the loss of iteration {iteration} is {loss:.4g}: the median of the last {len(self._recent)} was "
            f"{median(self._recent):.4g}"
        )
        ends = self.must_end()
        if is_main_process() and not ends:
            logger.warning("%s%s", self.description, _DONE[self.action])
        if self.action == "warn":
            self._recent.append(loss)
        return self.action != "warn"

    def must_end(self) -> bool:
        """Whether the latest spike ends training."""
        return self.action == "raise" or (self.action != "warn" and self.in_a_row >= MAX_SPIKES_IN_A_ROW)

    def _is_spike(self, loss: float) -> bool:
        if len(self._recent) < 10:
            return False
        middle = median(self._recent)
        deviation = 1.4826 * median(abs(value - middle) for value in self._recent)
        return loss > middle + self._threshold * max(deviation, 1e-3 * abs(middle))

    def all_good(self) -> None:
        """None of the losses that were fetched at once was one."""
        self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {"recent": list(self._recent), "count": self.count, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back `state_dict`."""
        self._recent.clear()
        self._recent.extend(state["recent"])
        self.count, self.in_a_row = state["count"], state.get("in_a_row", 0)


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
        super().__init__(
            f"{found}{effect}. Lower the learning rate, clip the gradients (train.clip_grad.max_norm), or leave such "
            "updates out (train.non_finite=skip), which also names the first bad module."
        )


class LossSpike(NonFiniteLoss):
    """A loss far above the recent ones that ends training, as one that is not finite does."""

    def __init__(self, iteration: int, losses: Mapping[str, float], spikes: LossSpikes):
        self.iteration, self.losses, self.diagnosis = iteration, dict(losses), spikes.description
        if spikes.action == "raise":
            reason = "train.monitor.loss_spike_action=raise"
            remedy = "train.monitor.loss_spike_action=skip leaves such updates out"
        else:
            reason = f"{MAX_SPIKES_IN_A_ROW} losses in a row were spikes"
            remedy = "resume from an earlier checkpoint, or raise train.monitor.loss_spike where such losses are usual"
        FloatingPointError.__init__(
            self,
            f"{spikes.description} ({reason}). Its update was undone, and nothing was saved. "
            f"Look at the data, lower the learning rate, clip the gradients (train.clip_grad.max_norm); {remedy}.",
        )


class LossGuard:
    """What a loop does about a loss that is bad: not finite, or a spike. This one keeps nothing, and ends training."""

    #: whether it can undo an update
    undoes_updates = False

    def before_update(self, iteration: int, micro_batches: list[Any]) -> None:
        """Called before every update."""

    def all_finite(self) -> None:
        """Called when all losses up to now have been found good."""

    def resolve(self, iteration: int, losses: Mapping[str, float], latest: dict[str, float]) -> dict[str, float]:
        """Called for the first iteration (0-based) whose loss is bad; raises, or returns the numbers to log
        for the latest iteration in place of `latest`. Collective."""
        raise NonFiniteLoss(iteration + 1, losses, updated=True)

    def forget(self) -> None:
        """Called when the state has been changed by something else than an update."""
