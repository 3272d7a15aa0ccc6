"""From the results of updates, which stay on the device, to numbers that are known to be finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libai.engine.loop.loss_spikes import LossSpikes

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


class LossSpike(NonFiniteLoss):
    """A loss far above the recent ones that ends training, as one that is not finite does."""

    def __init__(self, iteration: int, losses: Mapping[str, float], spikes: LossSpikes):
        self.iteration, self.losses, self.diagnosis = iteration, dict(losses), spikes.description
        if spikes.action == "raise":
            asked, remedy = "action=raise", "train.monitor.loss_spike_action=skip leaves such updates out"
        else:
            asked = f"limit={spikes.limit}, and as many losses in a row were spikes"
            remedy = "resume from an earlier checkpoint, or raise train.monitor.loss_spike where such losses are usual"
        FloatingPointError.__init__(
            self,
            f"{spikes.description} (train.monitor.loss_spike_{asked}). Its update was undone, and nothing was saved. "
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


class PendingMetrics:
    """Results that wait for a log point, and the numbers of the iteration that was fetched last.

    Attributes:
        pending: `(0-based iteration, what its update has returned)`.
        latest: the numbers fetched last, keyed by tag.
        spikes: judges finite losses, where that was asked for.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, Any]] = []
        self.latest: Mapping[str, float] = {}
        self.spikes: LossSpikes | None = None
        self._completed = 0

    def fetch(self, collect: Callable[[list[Any]], list[dict[str, float]]], guard: LossGuard) -> None:
        """Let `collect` turn all results into numbers, and `guard` act on the first whose loss is bad."""
        if not self.pending:
            return
        results, self.pending = self.pending, []
        numbers = collect([result for _, result in results])
        bad = self.first_bad([iteration for iteration, _ in results], numbers)
        if bad is None:
            guard.all_finite()
            if self.spikes is not None:
                self.spikes.all_good()
        else:
            numbers[-1] = guard.resolve(results[bad][0], numbers[bad], numbers[-1])
        self._completed, self.latest = results[-1][0] + 1, numbers[-1]

    def first_bad(self, iterations: Sequence[int], numbers: Sequence[Mapping[str, float]]) -> int | None:
        """The index of the first loss that is not finite, or is a spike whose update must be undone."""
        for index, (iteration, values) in enumerate(zip(iterations, numbers)):
            loss = values["train/loss"]
            if not math.isfinite(loss) or (self.spikes is not None and self.spikes.judge(iteration + 1, loss)):
                return index
        return None

    def of(self, completed_iters: int) -> dict[str, float]:
        """The numbers fetched last when they are those after `completed_iters` updates; otherwise none."""
        return dict(self.latest) if completed_iters == self._completed else {}

    def state_dict(self, completed_iters: int) -> dict[str, str]:
        """`of`, as text: that can be inf, JSON cannot."""
        return {tag: repr(value) for tag, value in self.of(completed_iters).items()}

    def load_state_dict(self, completed_iters: int, state: Mapping[str, str]) -> None:
        """Take back `state_dict`."""
        self._completed, self.latest = completed_iters, {tag: float(text) for tag, text in state.items()}
