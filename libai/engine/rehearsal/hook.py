"""`train.rehearse_every=N`: in mid-run, every Nth update is made twice before it counts, and compared."""

from __future__ import annotations

from typing import Any

from libai.engine.hook_base import HookBase
from libai.engine.rehearsal.reference import reference_of
from libai.engine.rehearsal.rehearsal import can_compare, is_own_update, require_same, why_not
from libai.utils.errors import UserError


class RehearsalHook(HookBase):
    """Before every `every`th iteration make its update eagerly and as the trainer makes it, put both back, and raise
    `NotTheSame` if a loss, a weight, an optimizer state or a buffer differs.

    Training itself is the same to the last bit. Costs two updates, and copies of weights and optimizer state. In
    float32 only: raises `UserError` with AMP, where the eager update would have another precision. Collective.
    """

    priority = 6  # after RandomStateHook, which seeds what eager operations draw

    def __init__(self, every: int):
        self._every = every

    def before_train(self) -> None:
        trainer: Any = self.trainer
        amp = trainer.options.amp
        if amp is not None:
            raise UserError(
                f"train.rehearse_every={self._every} repeats the update eagerly in float32, and amp={amp} computes in "
                f"{amp}: the difference would be that of the precisions. Compare without AMP (train.amp.enabled=false)."
            )
        if not is_own_update(trainer):
            raise UserError(
                f"train.rehearse_every={self._every} compares with the update of libai's trainers, and "
                f"{type(trainer).__name__} makes one of its own. Remove the setting."
            )

        reason = why_not(trainer)
        if reason is not None:
            raise UserError(f"train.rehearse_every={self._every} cannot compare updates: {reason}. Remove the setting.")

    def before_step(self) -> None:
        """Rehearse the update of this iteration, if it is its turn."""
        trainer: Any = self.trainer
        is_first = trainer.iter == trainer.start_iter  # the trainer prepares itself for that one
        if is_first or (trainer.iter + 1) % self._every:
            return
        with trainer.loop.not_training():
            iterations = [trainer.feed.peek()]
            if can_compare(trainer, iterations):
                require_same(trainer, iterations, reference_of(trainer, iterations))
