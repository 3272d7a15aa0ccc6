"""Handle a loss that is not finite or a spike: undo, find the cause, and raise, skip or roll back. In both modes.

Nothing is checked between log points. Instead a copy of the state and the batches since are kept; when a log point
finds a bad loss, the state is put back and the updates are made again, bit for bit, up to the one that corrupted it.
That iteration's batch is then run op by op to name the first module whose output or gradient is not finite. A spike is
undone in the same way, up to the iteration that had it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from libai.engine.data_feed import num_bytes
from libai.engine.hook_base import HookBase, Period, is_due
from libai.engine.metrics import LossPolicy, NonFiniteLoss
from libai.engine.rehearsal.kept import forward_rolled_back
from libai.engine.snapshot import Snapshot
from libai.forward.first_non_finite import find_first_non_finite, weights_are_finite
from libai.scheduler import has_state
from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")

#: a new copy of the state is made at the first log point after this number of iterations, or bytes of batches
MIN_ITERS_BETWEEN_COPIES = 50
MAX_BATCH_BYTES = 64 * 2**20
#: this number of bad iterations in a row is not bad luck
MAX_BAD_IN_A_ROW = 10
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
        """Return whether the update of `iteration` (1 is the first) must be undone. Call it once for each, in order."""
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
        """Return whether the latest spike ends training."""
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
        """Return the state that a resumed run needs."""
        return {"recent": list(self._recent), "count": self.count, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back `state_dict`."""
        self._recent.clear()
        self._recent.extend(state["recent"])
        self.count, self.in_a_row = state["count"], state.get("in_a_row", 0)


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


class BadLossHook(HookBase, LossPolicy):
    """Keeps what is needed to undo and repeat the latest updates of its trainer, and acts on a bad loss.

    A trainer whose options ask for `non_finite` or `keeps_copy` has one. Memory: one copy of weights and optimizer
    state on the device, and the batches since it was made.

    Args:
        policy: "raise" ends training with the weights of before the bad update; "skip" leaves that update out;
            "rollback" goes back to the last good copy and drops the updates since, the data continues.
        schedule: the trainer's; its state is part of the copy.
    """

    #: before the hooks that fetch losses
    priority = 1

    def __init__(self, policy: str = "raise", schedule: Any = None):
        if not (schedule is None or has_state(schedule)):
            asked = "keeps_copy=True" if policy == "raise" else f"non_finite={policy!r}"
            raise UserError(
                f"{asked} undoes updates by a copy of the state in memory. Give the schedule state_dict() and "
                "load_state_dict(), or use non_finite='raise' without keeps_copy, and only warn of loss spikes."
            )
        self.policy = policy
        self.bad_iterations: list[int] = []
        self._snapshot: Snapshot | None = None
        self._batches: list[tuple[int, list[Any]]] = []
        self._bytes = 0
        self._bad_in_a_row = 0
        self._generation = 0

    def before_train(self) -> None:
        self.trainer.loop.metrics.policy = self

    def before_update(self) -> None:
        """Remember the batch of an iteration; makes the first copy of the state."""
        trainer = self.trainer
        if self._generation != trainer.loop.generation:
            self.forget()
            self._generation = trainer.loop.generation
        if self._bytes > MAX_BATCH_BYTES:
            trainer.check_finite()
        if self._snapshot is None:
            self._snapshot = Snapshot.of(trainer)
        micro_batches = trainer.feed.batches
        self._batches.append((trainer.iter, micro_batches))
        for batch in micro_batches:
            self._bytes += num_bytes(batch)

    def after_save(self) -> None:
        """A rollback goes back no further than it would in a resumed run."""
        self.forget()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forget the copy: a plateau schedule follows the evaluation, which a repetition would leave out."""
        try:
            yield
        finally:
            self.forget()

    def all_good(self) -> None:
        """See `LossPolicy.all_good`: a later copy of the state may take the place of this one."""
        super().all_good()
        self._bad_in_a_row = 0
        if len(self._batches) >= MIN_ITERS_BETWEEN_COPIES or self._bytes > MAX_BATCH_BYTES:
            self.forget()

    def forget(self) -> None:
        """Begin again at the next update."""
        self._snapshot = None
        self._batches = []
        self._bytes = 0

    # ------------------------------------------------------------------ when it has happened

    def on_bad_loss(self, iteration: int, losses: Mapping[str, float], latest: dict[str, float]) -> dict[str, float]:
        """See `LossPolicy.on_bad_loss`; undoes and acts as the policy says."""
        while True:
            spikes = self.spikes if math.isfinite(losses["train/loss"]) else None
            policy = self.policy if spikes is None else "raise" if spikes.must_end() else spikes.action
            culprit, diagnosis, repeated = self.repair(iteration, policy, spikes is not None)
            if spikes is not None and policy == "raise":
                raise LossSpike(culprit + 1, losses, spikes)
            if spikes is None:
                self._note(culprit, diagnosis)
                if policy == "raise" or self._bad_in_a_row > MAX_BAD_IN_A_ROW:
                    raise NonFiniteLoss(culprit + 1, losses, updated=False, diagnosis=diagnosis)
            numbers = self.trainer.collect([result for _, result in repeated]) if repeated else [latest]
            bad = self.first_bad([i for i, _ in repeated], numbers) if repeated else None
            if bad is None:
                if self.bad_iterations:
                    numbers[-1]["train/bad_iterations"] = len(self.bad_iterations)
                return numbers[-1]
            iteration, losses = repeated[bad][0], numbers[bad]

    def repair(self, bad_iteration: int, policy: str, is_spike: bool = False) -> tuple[int, str, list[tuple[int, Any]]]:
        """Put the state back, find the update that corrupted it, or with `is_spike` that of `bad_iteration`, and act on
        it as `policy` says.

        Returns `(culprit, diagnosis, results)`: the 0-based iteration, a sentence on what was not finite first, and the
        results `(iteration, StepResult)` of updates that were made again after it (`skip`). With "raise" the state is
        that before the culprit. Collective.
        """
        trainer = self.trainer
        batches = self._batches
        assert self._snapshot is not None
        present = trainer.iter
        self._snapshot.restore(trainer)
        before = self._snapshot
        culprit, diagnosis = bad_iteration, ""
        last = len(batches) - 1
        for index, (iteration, micro_batches) in enumerate(batches):
            trainer.iter, last = iteration, index
            if is_spike and iteration == bad_iteration:
                break
            before = Snapshot.of(trainer)
            result = trainer.update(micro_batches)
            loss = trainer.collect([result])[0]["train/loss"]
            if not math.isfinite(loss) or not weights_are_finite(trainer):
                before.restore(trainer)
                with forward_rolled_back(trainer.model):  # batch statistics would take the bad numbers in
                    culprit, diagnosis = iteration, find_first_non_finite(trainer, micro_batches)
                break
            self._let_hooks_follow()
        else:
            # the repetition was clean: the loss depends on something that is not part of the state
            diagnosis = "it did not happen again when the updates were repeated, so the forward is not deterministic"
        trainer.iter = culprit
        results: list[tuple[int, Any]] = []
        if policy == "skip":
            results = self._skip(last, batches)
        elif policy == "rollback":
            self._snapshot.restore(trainer)
            self.forget()
        trainer.iter = present
        return culprit, diagnosis, results

    def _skip(self, index: int, batches: list[tuple[int, list[Any]]]) -> list[tuple[int, Any]]:
        """Leave out the update at `index`; the schedule continues, and the later updates are made again."""
        trainer = self.trainer
        trainer.finish_update()
        self._batches = []
        self._snapshot = Snapshot.of(trainer)
        results = []
        for iteration, micro_batches in batches[index + 1 :]:
            trainer.iter = iteration
            self._batches.append((iteration, micro_batches))
            results.append((iteration, trainer.update(micro_batches)))
            self._let_hooks_follow()
        return results

    def _let_hooks_follow(self) -> None:
        """Call the hooks that follow the weights after an update that was made again."""
        for hook in self.trainer.hooks:
            if hook.overrides("tensors"):
                hook.after_step()

    def _note(self, culprit: int, diagnosis: str) -> None:
        self.bad_iterations.append(culprit + 1)
        self._bad_in_a_row += 1
        if self.policy == "raise" or not is_main_process():
            return
        done = {"skip": "its update was left out", "rollback": "the run went back to the last good state"}[self.policy]
        logger.warning("iteration %d is not finite: %s; %s", culprit + 1, diagnosis, done)


class LossSpikeHook(HookBase):
    """Has the losses of all iterations judged by a `LossSpikes`, whose arguments it takes, and logs the number of
    spikes as `train/loss_spikes`.

    Losses are looked at when they are fetched, at log points. An `action` other than "warn" undoes updates, for which
    the trainer needs `keeps_copy=True`.
    """

    def __init__(self, period: Period, threshold: float = 6.0, window: int = 100, action: str = "warn"):
        self._period = period
        self._spikes = LossSpikes(threshold, action, window)

    def before_train(self) -> None:
        policy = self.trainer.loop.metrics.policy
        if self._spikes.action != "warn" and not isinstance(policy, BadLossHook):
            raise UserError(
                f"LossSpikeHook(action={self._spikes.action!r}) undoes updates, and this trainer keeps no copy of its "
                "state. Build it with keeps_copy=True, or only warn."
            )
        policy.spikes = self._spikes

    def after_step(self) -> None:
        if is_due(self._period, self.trainer.iter + 1):
            self.trainer.fetch_metrics()
            self.trainer.storage.put_scalar("train/loss_spikes", self._spikes.count)

    def state_dict(self) -> dict[str, Any]:
        self.trainer.fetch_metrics()
        return self._spikes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._spikes.load_state_dict(state)
