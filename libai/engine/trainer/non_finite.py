"""What happens when a loss is not finite or a spike: undo, find the cause, and raise, skip or roll back. In both modes.

Nothing is checked between log points. Instead a copy of the state and the batches since are kept; when a log point
finds a bad loss, the state is put back and the updates are made again, bit for bit, up to the one that corrupted it.
That iteration's batch is then run op by op to name the first module whose output or gradient is not finite. A spike is
undone in the same way, up to the iteration that had it.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from libai.engine.loop.loss_guard import LossGuard, LossSpike, NonFiniteLoss
from libai.engine.trainer.snapshot import Snapshot
from libai.forward.first_non_finite import find_first_non_finite, weights_are_finite
from libai.scheduler import has_state
from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError

if TYPE_CHECKING:
    from libai.engine.trainer.model_trainer import ModelTrainer

logger = logging.getLogger("libai.engine")

#: a new copy of the state is made at the first log point after so many iterations, or so many bytes of batches
MIN_ITERS_BETWEEN_COPIES = 50
MAX_BATCH_BYTES = 64 * 2**20
#: so many bad iterations in a row are not bad luck
MAX_BAD_IN_A_ROW = 10


class NonFiniteGuard(LossGuard):
    """Keeps what is needed to undo and repeat the latest updates of one trainer.

    `policy`: "raise" ends training with the weights of before the bad update; "skip" leaves that update out;
    "rollback" goes back to the last good copy and drops the updates since, the data continues. Memory: one copy of
    weights and optimizer state on the device, and the batches since it was made.
    """

    undoes_updates = True

    def __init__(self, trainer: ModelTrainer):
        options, schedule = trainer.options, trainer.lr_scheduler
        self.policy = options.non_finite
        if not (schedule is None or has_state(schedule)):
            asked = "keeps_copy=True" if self.policy == "raise" else f"non_finite={self.policy!r}"
            raise UserError(
                f"{asked} undoes updates by a copy of the state in memory. Give the schedule state_dict() and "
                "load_state_dict(), or use non_finite='raise' without keeps_copy, and only warn of loss spikes."
            )
        self.bad_iterations: list[int] = []
        # without a cycle the trainer, its graph and the memory of both go when the last user lets go of it
        self._trainer: ModelTrainer = weakref.proxy(trainer)
        self._snapshot: Snapshot | None = None
        self._batches: list[tuple[int, list[Any]]] = []
        self._bytes = 0
        self._bad_in_a_row = 0

    def before_update(self, iteration: int, micro_batches: list[Any]) -> None:
        """Remember the batch of an iteration; makes the first copy of the state."""
        if self._bytes > MAX_BATCH_BYTES:
            self._trainer.check_finite()
        if self._snapshot is None:
            self._snapshot = Snapshot.of(self._trainer)
        self._batches.append((iteration, micro_batches))
        for batch in micro_batches:
            self._bytes += num_bytes(batch)

    def all_finite(self) -> None:
        """The losses up to now are good: a later copy of the state may take the place of this one."""
        self._bad_in_a_row = 0
        if len(self._batches) >= MIN_ITERS_BETWEEN_COPIES or self._bytes > MAX_BATCH_BYTES:
            self.forget()

    def forget(self) -> None:
        """Begin anew at the next update, as after a checkpoint was loaded."""
        self._snapshot, self._batches, self._bytes = None, [], 0

    # ------------------------------------------------------------------ when it has happened

    def resolve(self, iteration: int, losses: Mapping[str, float], latest: dict[str, float]) -> dict[str, float]:
        """See `LossGuard.resolve`; undoes and acts as the policy says."""
        metrics = self._trainer.loop.metrics
        while True:
            spikes = metrics.spikes if math.isfinite(losses["train/loss"]) else None
            policy = self.policy if spikes is None else "raise" if spikes.must_end() else spikes.action
            culprit, diagnosis, repeated = self.repair(iteration, policy, spikes is not None)
            if spikes is not None and policy == "raise":
                raise LossSpike(culprit + 1, losses, spikes)
            if spikes is None:
                self._note(culprit, diagnosis)
                if policy == "raise" or self._bad_in_a_row > MAX_BAD_IN_A_ROW:
                    raise NonFiniteLoss(culprit + 1, losses, updated=False, diagnosis=diagnosis)
            numbers = self._trainer.collect([result for _, result in repeated]) if repeated else [latest]
            bad = metrics.first_bad([i for i, _ in repeated], numbers) if repeated else None
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
        trainer, batches = self._trainer, self._batches
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
        trainer = self._trainer
        trainer._step_schedule()
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
        for hook in self._trainer.hooks:
            if hook.overrides("tensors"):
                hook.after_step()

    def _note(self, culprit: int, diagnosis: str) -> None:
        self.bad_iterations.append(culprit + 1)
        self._bad_in_a_row += 1
        if self.policy == "raise" or not is_main_process():
            return
        done = {"skip": "its update was left out", "rollback": "the run went back to the last good state"}[self.policy]
        logger.warning("iteration %d is not finite: %s; %s", culprit + 1, diagnosis, done)


def num_bytes(batch: Any) -> int:
    """Bytes of the arrays and tensors of a batch, of those at its top level."""
    values: Iterable[Any]
    if type(batch) is dict or isinstance(batch, Mapping):  # asking for Mapping runs Python code
        values = batch.values()
    else:
        values = batch if isinstance(batch, (list, tuple)) else [batch]
    total = 0
    for value in values:  # it runs in every iteration: no generator
        total += value.nbytes if isinstance(value, np.ndarray) else 8 * getattr(value, "numel", int)()
    return total
